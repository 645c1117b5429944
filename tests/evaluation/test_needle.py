"""Needles answered: hand-made marks, both protocols against a plain model's own greedy run."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
import torch
from tests.bases import make_base, make_tokenizer
from transformers import AutoModelForCausalLM

from zoomkv.backbone.prefill import prefill
from zoomkv.data.needles import Needle, NeedleShape, needle
from zoomkv.evaluation import answering as module
from zoomkv.evaluation.needle import (
    Attempt,
    NeedleArm,
    answer_recorded,
    run_needles,
    split_prompt,
    string_match,
)
from zoomkv.evaluation.recording import record
from zoomkv.evaluation.statistics import wilson
from zoomkv.generation import Generator, load

BUDGET, SINKS = 64, 4


@pytest.fixture(scope="module")
def path(tmp_path_factory: Any) -> str:
    return make_base(tmp_path_factory.mktemp("base"))


@pytest.fixture(scope="module")
def loaded(path: str) -> Any:
    return load(path)


@pytest.fixture(scope="module")
def found() -> list[Needle]:
    """Prompts of three lengths, so that a batch of them has padding."""
    tokenizer = make_tokenizer()

    def count(text: str) -> int:
        return len(tokenizer(text, add_special_tokens=False)["input_ids"])

    shapes = [NeedleShape(300), NeedleShape(317), NeedleShape(340, "multi-query", 2)]
    return [needle(seed, shape, count_tokens=count) for seed, shape in enumerate(shapes)]


def answered(generator: Generator, needles: list[Needle], **options: Any) -> NeedleArm:
    *_, arm = run_needles(generator, needles, **({"max_new_tokens": 12} | options))
    assert [attempt.id for attempt in arm.attempts] == [one.id for one in needles]
    return arm


@pytest.mark.parametrize(
    ("text", "answers", "share"),
    [
        ("It is 1234567.", ["1234567"], 1.0),
        ("It is 1234568.", ["1234567"], 0.0),
        ("1234567, and 7654321", ["7654321", "1234567"], 1.0),
        ("1234567 1234567", ["7654321", "1234567"], 0.5),
        ("AB-Fox", ["ab-fox"], 1.0),
        ("ab fox", ["AB-FOX"], 0.0),
        ("", ["1", "2", "3"], 0.0),
        ("a 1, b 3", ["1", "2", "3"], 2 / 3),
    ],
)
def test_string_match_by_hand(text: str, answers: list[str], share: float) -> None:
    assert string_match(text, answers) == pytest.approx(share)


def attempt(id: str, found: float, **fields: Any) -> Attempt:
    given: dict[str, Any] = {
        "kind": "single",
        "length": 100,
        "depths": (50.0,),
        "text": "t",
        "ids": [1, 2],
        "finished": True,
        "device_bytes_mean": 10.0,
        "device_bytes_peak": 20.0,
        "host_bytes": 5.0,
    }
    return Attempt(id=id, found=found, **(given | fields))


def test_cells_are_counted_apart() -> None:
    arm = NeedleArm("full", {"a": 1}, "unknown")
    arm.attempts = [
        attempt("a", 1.0, length=200),
        attempt("b", 0.5, finished=False, device_bytes_mean=30.0, device_bytes_peak=21.0),
        attempt("c", 1.0, host_bytes=6.0),
        attempt("d", 1.0, depths=(0.0, 9.0), kind="multi-query"),
    ]
    cells = arm.cells()
    assert list(cells) == [
        (100, (0.0, 9.0), "multi-query"),
        (100, (50.0,), "single"),
        (200, (50.0,), "single"),
    ]
    two = cells[(100, (50.0,), "single")]
    assert (two.n, two.hits, two.found, two.truncated) == (2, 1, 0.75, 1)
    assert two.interval == wilson(1, 2)
    assert (two.device_bytes_mean, two.device_bytes_peak, two.host_bytes) == (20.0, 21.0, 6.0)
    total = arm.total()
    assert (total.n, total.hits, total.found) == (4, 3, 0.875)
    record = json.loads(json.dumps(arm.record()))
    assert record["total"]["hits"] == 3 and record["protocol"] == "unknown"
    assert [cell["n"] for cell in record["cells"]] == [1, 2, 1]
    assert record["cells"][0]["depths"] == [0.0, 9.0] and record["attempts"][1]["found"] == 0.5


@pytest.mark.parametrize("opening", [False, True])
@pytest.mark.parametrize("chat", [False, True])
def test_a_prompt_is_cut_where_the_question_begins(
    loaded: Any, found: list[Needle], chat: bool, opening: bool
) -> None:
    generator = Generator(*loaded, chat=chat)
    for one in found:
        first, second = split_prompt(generator, one, opening)
        tokenizer = generator.tokenizer
        whole = tokenizer(generator.render(one.prompt), add_special_tokens=not chat)["input_ids"]
        assert (first + second)[: len(whole) - 1] == whole[:-1]
        assert opening or first + second == whole
        before, after = tokenizer.decode(first), tokenizer.decode(second)
        assert one.context in before + after and one.question not in before
        assert len(before) >= before.find(one.context[:30]) + len(one.context) - 8
        assert one.question in after and after.rstrip().endswith(one.opening) == opening


def test_a_template_that_rewrites_the_question_is_refused(
    loaded: Any, found: list[Needle], monkeypatch: pytest.MonkeyPatch
) -> None:
    generator = Generator(*loaded)
    monkeypatch.setattr(generator, "render", str.upper)
    with pytest.raises(ValueError, match="the chat template rewrites prompts"):
        split_prompt(generator, found[0], True)


def test_inside_is_what_the_generator_says(loaded: Any, found: list[Needle]) -> None:
    generator = Generator(*loaded)
    answers = generator.generate([one.prompt for one in found], 12)
    arm = answered(generator, found, protocol="inside", batch_size=3, opening=False)
    assert [one.ids for one in arm.attempts] == [answer.ids for answer in answers]
    assert [one.text for one in arm.attempts] == [answer.text for answer in answers]
    assert [one.finished for one in arm.attempts] == [answer.finished for answer in answers]
    assert len({tuple(one.ids) for one in arm.attempts}) > 1
    first = answered(generator, found[:1], protocol="inside", opening=False, max_new_tokens=1)
    generator.generate(found[0].prompt, 1)
    assert generator.stats is not None
    assert first.attempts[0].device_bytes_mean == generator.stats.device_bytes_mean
    assert first.attempts[0].device_bytes_peak == generator.stats.device_bytes_peak


@pytest.mark.parametrize("policy", ["full", "full_offloaded"])
def test_the_full_cache_does_not_mind_when_the_question_comes(
    loaded: Any, found: list[Needle], policy: str
) -> None:
    generator = Generator(*loaded, policy)
    inside = answered(generator, found, protocol="inside")
    for batch_size in (1, 3):  # alone, and with padding within the rows
        unknown = answered(generator, found, protocol="unknown", batch_size=batch_size)
        assert [a.ids for a in unknown.attempts] == [a.ids for a in inside.attempts]
    assert len({tuple(a.ids) for a in inside.attempts}) == len(found)


def dense(model: Any, room: int, first: list[int], second: list[int], new: int) -> list[int]:
    """Greedy tokens of sinks and window, when the window closes before ``second`` is read.

    One forward over everything for each token, with exactly the rows unmasked that may be read.
    """
    ids, readable = list(first), [list(range(at + 1)) for at in range(len(first))]

    def bounded(rows: list[int]) -> list[int]:
        return rows if len(rows) <= room else rows[:SINKS] + rows[SINKS - room :]

    kept = bounded(list(range(len(first))))
    for token in second:
        ids.append(token)
        kept = [*kept, len(ids) - 1]
        readable.append(kept)
    kept, said = bounded(kept), []
    while True:
        mask = torch.full((len(ids), len(ids)), torch.finfo(torch.float32).min)
        for at, rows in enumerate(readable):
            mask[at, rows] = 0
        with torch.no_grad():
            logits = model(torch.tensor([ids]), attention_mask=mask[None, None]).logits
        said.append(int(logits[0, -1].argmax()))
        if len(said) == new:
            return said
        ids.append(said[-1])
        kept = bounded([*kept, len(ids) - 1])
        readable.append(kept)


def test_unknown_reads_the_question_over_what_was_left_of_the_context(
    loaded: Any, path: str, found: list[Needle]
) -> None:
    generator = Generator(*loaded, "streaming_llm", budget=BUDGET, n_sink=SINKS)
    plain = AutoModelForCausalLM.from_pretrained(path, attn_implementation="eager").eval()
    ends = generator.model.generation_config.eos_token_id
    ends = [ends] if isinstance(ends, int) else ends
    inside = answered(generator, found, protocol="inside", max_new_tokens=6)
    unknown = answered(generator, found, protocol="unknown", max_new_tokens=6)
    for one, a in zip(found, unknown.attempts, strict=True):
        first, second = split_prompt(generator, one, True)
        cache = generator.new_cache()
        prefill(generator.model, cache, torch.tensor([first]))
        room = cache.footprint().rows_max  # the budget less what indexes take
        assert BUDGET - 8 < room <= BUDGET
        expected = dense(plain, room, first, second, 6)
        end = next((at for at, token in enumerate(expected) if token in ends), 6)
        assert a.ids == expected[: end + 1]
    # What the oracle tells apart: the answers would be others had the whole context been read.
    assert [a.ids for a in unknown.attempts] != [a.ids for a in inside.attempts]


@pytest.mark.parametrize(("policy", "budget"), [("streaming_llm", BUDGET), ("snapkv", 160)])
def test_the_context_is_compressed_before_the_question_comes(
    loaded: Any, found: list[Needle], policy: str, budget: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = []

    def watched(model: Any, cache: Any, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        logits = prefill(model, cache, ids, mask)
        footprint = cache.footprint()
        seen.append((ids.shape[1], footprint.rows_max, footprint.device_bytes))
        return logits

    monkeypatch.setattr(module, "prefill", watched)
    generator = Generator(*loaded, policy, budget=budget, count_prefix=True)
    full = answered(Generator(*loaded), found[:1], protocol="unknown").attempts[0]
    seen.clear()
    one = answered(generator, found[:1], protocol="unknown").attempts[0]
    [(columns, rows, held)] = seen
    first, second = split_prompt(generator, found[0], True)
    assert columns == len(first) > budget >= rows
    assert one.device_bytes_peak >= held
    assert one.device_bytes_mean <= one.device_bytes_peak < full.device_bytes_peak


def test_hits_are_marked(loaded: Any, found: list[Needle]) -> None:
    """With answers that the tiny model happens to give."""
    generator = Generator(*loaded)
    said = answered(generator, found, protocol="inside").attempts
    told = [
        replace(found[0], answers=(said[0].text[2:6],)),
        replace(found[1], answers=(said[1].text[:4], "no such text")),
        replace(found[2], answers=("no such text",)),
    ]
    arms = list(run_needles(generator, told, "inside", max_new_tokens=12, batch_size=2))
    assert arms[0] is arms[-1] and len(arms) == 2
    assert [a.found for a in arms[-1].attempts] == [1.0, 0.5, 0.0]
    assert [a.hit for a in arms[-1].attempts] == [True, False, False]
    assert arms[-1].seconds > 0


def test_an_unknown_protocol_is_refused(loaded: Any, found: list[Needle]) -> None:
    with pytest.raises(ValueError, match="protocol='before': choose one of inside, unknown"):
        next(run_needles(Generator(*loaded), found, "before"))  # type: ignore[arg-type]


@pytest.mark.parametrize("protocol", ["inside", "unknown"])
def test_a_recorded_prompt_is_answered_alike(
    loaded: Any, found: list[Needle], protocol: Any
) -> None:
    model, tokenizer = loaded
    generator = Generator(model, tokenizer, "streaming_llm", budget=BUDGET, n_sink=SINKS)
    for one in found:
        arm = answered(generator, [one], protocol=protocol)
        context, question = split_prompt(generator, one, True)
        recording = record(model, torch.tensor([context + question]))
        again = answer_recorded(generator, one, recording, len(context), protocol, 12)
        assert replace(again, host_bytes=0) == replace(arm.attempts[0], host_bytes=0)
