"""Fidelity as a task: whose texts, where they are cut, and the curve against a loop."""

from __future__ import annotations

import copy
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.bases import make_base

from zoomkv.evaluation.fidelity import Fidelity, full_log_probs
from zoomkv.evaluation.tasks.registry import task
from zoomkv.generation import Generator, load


@pytest.fixture(scope="module")
def generator(tmp_path_factory: Any) -> Generator:
    return Generator(*load(make_base(tmp_path_factory.mktemp("base"))))


@pytest.fixture
def story(tmp_path: Path) -> str:
    """A text of 600 different words, so that a window can be found again."""
    path = tmp_path / "story.txt"
    path.write_text(" ".join(f"word{n} has" for n in range(300)), encoding="utf-8")
    return str(path)


def counting(generator: Generator) -> Any:
    return lambda text: len(generator.tokenizer(generator.render(text))["input_ids"])


def test_the_curve_is_the_mean_of_each_bin() -> None:
    kl = torch.tensor([0.5, 1.5, 0.0, 3.0, 0.25])
    same = torch.tensor([True, False, True, True, False])
    found = Fidelity([torch.ones(1), kl], [torch.ones(1).bool(), same])
    assert found.curve(1, width=2) == {
        "position": [0.0, 2.0, 4.0],
        "kl": [1.0, 1.5, 0.25],
        "top1": [0.5, 1.0, 0.0],
    }
    assert found.curve(1, width=9)["kl"] == pytest.approx([1.05])
    assert found.curve(1, width=9)["top1"] == pytest.approx([0.6])
    assert found.curve(1, width=1)["kl"] == kl.tolist()
    with pytest.raises(ValueError, match="width=0"):
        found.curve(1, width=0)


def test_texts_of_a_task_are_written_by_the_full_cache(generator: Generator) -> None:
    made = task("fidelity", texts="ledger", tokens=12)
    asked = made.questions(2, None, 5, counting(generator))
    plain = task("ledger").questions(2, None, 5, counting(generator))
    assert [one.prompt for one in asked] == [one.prompt for one in plain]
    for one in asked:
        ready = made.prepared(one, generator)
        assert ready.id == one.id and ready.max_new_tokens == len(ready.reference["answer"])
        [written] = generator.generate(one.prompt, max_new_tokens=12)
        assert ready.reference["answer"] == written.ids
        text = generator.render(one.prompt)
        assert generator.tokenizer.decode(ready.reference["prompt"]) == text
        # What the full cache wrote is what a dense forward holds for likeliest.
        [expected] = full_log_probs(
            generator.model, [ready.reference["prompt"]], [ready.reference["answer"]]
        )
        assert expected.argmax(1).tolist() == ready.reference["answer"]
        json.dumps(asdict(ready))


def test_held_out_text_goes_on_where_its_prompt_ends(generator: Generator, story: str) -> None:
    made = task("fidelity", texts=story, tokens=20)
    text = Path(story).read_text(encoding="utf-8")
    count = counting(generator)
    asked = made.questions(3, 150, 1, count)
    assert len({one.prompt for one in asked}) == 3
    for one in asked:
        assert 140 <= count(one.prompt) <= 150
        ready = made.prepared(one, generator)
        prompt, answer = ready.reference["prompt"], ready.reference["answer"]
        assert len(answer) == 20
        assert generator.tokenizer.decode(prompt) == one.prompt
        assert generator.tokenizer.decode(prompt + answer) in text
        assert text.count(generator.tokenizer.decode(prompt + answer)) == 1


@pytest.mark.parametrize("spare", [0, 40])
def test_a_prompt_may_take_nearly_all_of_a_text(
    generator: Generator, tmp_path: Path, spare: int
) -> None:
    """Words of several tokens: the text holds more tokens than a count of its words promises."""
    path, count = tmp_path / "short.txt", counting(generator)
    path.write_text(" ".join(f"word{n}" for n in range(90)), encoding="utf-8")
    text, tokens = path.read_text(encoding="utf-8"), 6
    most = count(" ".join(text.split()[:-tokens]))
    made = task("fidelity", texts=str(path), tokens=tokens)
    asked = made.questions(6, most - 1 - spare, 0, count)
    assert len(text.split()) < most - 1 - spare
    starts = {one.about["word"] for one in asked}
    assert (starts == {0}) == (spare == 0)
    for one in asked:
        assert most - 12 - spare <= count(one.prompt) <= most - 1 - spare
        ready = made.prepared(one, generator)
        assert len(ready.reference["answer"]) == tokens
        both = ready.reference["prompt"] + ready.reference["answer"]
        assert generator.tokenizer.decode(both) in text
    with pytest.raises(ValueError, match="the text has only 90 words"):
        made.questions(1, most, 0, count)


def test_the_full_cache_reads_a_text_once_for_all_policies(
    generator: Generator, story: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from zoomkv.evaluation.tasks import fidelity

    read: list[Any] = []

    def reading(model: Any, prompts: Any, answers: Any) -> Any:
        read.append((model, prompts))
        return full_log_probs(model, prompts, answers)

    monkeypatch.setattr(fidelity, "full_log_probs", reading)
    made = task("fidelity", texts=story, tokens=8)
    other = copy.deepcopy(generator.model)
    other.model.norm.weight.data.mul_(3)  # another model: what it says is sharper
    model, expected = generator.model, []
    one, two = (made.prepared(q, generator) for q in made.questions(2, 90, 0, counting(generator)))
    for question, reader in [(one, model), (one, model), (one, other), (two, other), (one, model)]:
        policy = Generator(reader, generator.tokenizer, "streaming_llm", budget=8)
        mark = made.measure(question, reader, policy.new_cache())
        fresh = task("fidelity", texts=story, tokens=8)
        assert mark == fresh.measure(question, reader, policy.new_cache())
        expected.append((reader, [question.reference["prompt"]]))
    ours = [read[at] for at in (0, 3, 5, 7)]  # the others are of the fresh tasks
    assert len(read) == 4 + 5
    for (reader, prompts), (wanted, texts) in zip(
        ours, [expected[at] for at in (0, 2, 3, 4)], strict=True
    ):
        assert reader is wanted and prompts == texts


@pytest.mark.parametrize("texts", ["ledger", "story"])
def test_a_cache_that_drops_nothing_agrees(generator: Generator, story: str, texts: str) -> None:
    made = task("fidelity", texts=story if texts == "story" else texts, tokens=10)
    [one] = made.questions(1, 200, 0, counting(generator))
    ready = made.prepared(one, generator)
    steps: list[tuple[int, int]] = []
    cache = generator.new_cache()
    mark = made.measure(ready, generator.model, cache, lambda *step: steps.append(step))
    n = len(ready.reference["answer"])
    assert steps == [(at, n) for at in range(1, n + 1)]
    assert mark.right and mark.score == mark.about["top1"] == 1
    assert abs(mark.about["kl"]) < 1e-5
    assert cache.footprint().device_bytes > 0


def test_one_that_drops_rows_is_measured_along_the_answer(generator: Generator) -> None:
    made = task("fidelity", texts="ledger", tokens=24, width=5)
    [one] = made.questions(1, None, 3, counting(generator))
    ready = made.prepared(one, generator)
    prompt, answer = ready.reference["prompt"], ready.reference["answer"]
    options = {"policy": "streaming_llm", "budget": 8}
    policy = Generator(generator.model, generator.tokenizer, **options)
    mark = made.measure(ready, policy.model, policy.new_cache())

    cache = policy.new_cache()
    cache.expect_prompt(len(prompt))
    kl, same = [], []
    with torch.no_grad():
        logits = policy.model(torch.tensor([prompt]), cache=cache).logits[0, -1]
        for number, token in enumerate(answer):
            dense = policy.model(torch.tensor([[*prompt, *answer[:number]]]), use_cache=False)
            full = dense.logits[0, -1].double().log_softmax(-1)
            found = logits.double().log_softmax(-1)
            kl.append(float((full.exp() * (full - found)).sum()))
            same.append(float(full.argmax() == found.argmax()))
            logits = policy.model(torch.tensor([[token]]), cache=cache).logits[0, -1]
    bins = [range(at, min(at + 5, len(answer))) for at in range(0, len(answer), 5)]
    curve = mark.about["curve"]
    assert curve["position"] == [part[0] for part in bins]
    assert curve["kl"] == pytest.approx(
        [sum(kl[at] for at in part) / len(part) for part in bins], abs=1e-4
    )
    assert curve["top1"] == pytest.approx(
        [sum(same[at] for at in part) / len(part) for part in bins]
    )
    assert mark.about["kl"] == pytest.approx(sum(kl) / len(kl), abs=1e-4)
    assert mark.score == pytest.approx(sum(same) / len(same))
    assert mark.about["kl"] > 1e-4 and not mark.right  # something was lost, and it shows
    json.dumps(asdict(mark))


def test_bad_input(generator: Generator, story: str) -> None:
    count = counting(generator)
    with pytest.raises(ValueError, match="length=9000, tokens=9: the text has only 600 words"):
        task("fidelity", texts=story, tokens=9).questions(1, 9000, 0, count)
    with pytest.raises(ValueError, match="needs a length for held-out text"):
        task("fidelity", texts=story).questions(1, None, 0, count)
    made = task("fidelity")
    [one] = made.questions(1, None, 0, count)
    policy = Generator(generator.model, generator.tokenizer, "streaming_llm", budget=8)
    with pytest.raises(ValueError, match="written by policy 'full', not 'streaming_llm'"):
        made.prepared(one, policy)
