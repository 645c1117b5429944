"""Runs go on where they stopped, with the bytes of a run that never did, and mean what they say."""

from __future__ import annotations

import errno
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from tests.bases import make_base
from tests.evaluation.fakes import EchoTask, fake_answer

from zoomkv.caches.registry import names, options_of
from zoomkv.evaluation import cells, runner, writing
from zoomkv.evaluation.budgets import arms_of
from zoomkv.evaluation.cells import Cell
from zoomkv.evaluation.checks import tight, unbinding
from zoomkv.evaluation.results import read, read_timings, timing_path
from zoomkv.evaluation.runner import CheckFailed, evaluate
from zoomkv.evaluation.settings import Settings, TaskSettings
from zoomkv.evaluation.sharding import Share, part_path
from zoomkv.evaluation.tasks.registry import TASKS
from zoomkv.generation import Generator, load

CHECK = {"kind": "check", "policy": "full", "what": "full is sane", "ok": True, "detail": "é"}


@pytest.fixture(scope="module")
def base(tmp_path_factory: Any) -> str:
    return make_base(tmp_path_factory.mktemp("base"))


@pytest.fixture(scope="module")
def loaded(base: str) -> Any:
    return load(base)


@contextmanager
def patched() -> Iterator[None]:
    """Everything but models and caches is the real thing."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(TASKS, "echo", "tests.evaluation.fakes:EchoTask")
        patch.setattr(cells, "answer", fake_answer)
        patch.setattr(cells, "record", lambda model, ids: None)
        patch.setattr(runner, "check_full", lambda *given: CHECK)
        patch.setattr(runner, "check_arms", lambda *given: iter(()))
        patch.setattr(writing.os, "fsync", lambda number: None)
        yield


@pytest.fixture
def fakes(loaded: Any) -> Iterator[Any]:
    with patched():
        yield lambda name: loaded


def faked(base: str, **given: Any) -> Settings:
    return Settings.of(
        {
            "model": base,
            "policies": ["h2o", "full", {"policy": "sekv", "budgets": [0.5]}],
            "budgets": [0.25, 64],
            "lengths": [10, 20],
            "seeds": [3, 1],
            "n": 5,
            "tasks": [
                {"task": "echo", "name": "alone", "batch_size": 1},
                {"task": "echo", "name": "together", "batch_size": 2, "protocols": ["inside"]},
            ],
            **given,
        }
    )


@pytest.fixture(scope="module")
def plain(base: str, loaded: Any, tmp_path_factory: Any) -> bytes:
    """What an undisturbed run writes."""
    out = tmp_path_factory.mktemp("plain") / "a.jsonl"
    with patched():
        evaluate(faked(base), out, loader=lambda name: loaded)
    return out.read_bytes()


def test_the_order_and_the_fields_of_a_file(plain: bytes, base: str) -> None:
    header, check, *answers = map(json.loads, plain.splitlines())
    assert (header["kind"], header["format"], header["model"]) == ("header", 1, base)
    assert list(header["fingerprint"]) == [base] and header["settings"]["n"] == 5
    assert check == CHECK
    arms = [("full", None), ("h2o", 0.25), ("h2o", 64), ("sekv", 0.5)]
    expected = [
        ("alone", length, seed, protocol, label, budget, f"echo-{seed}-{length}-{at}")
        for length in (10, 20)
        for seed in (3, 1)
        for at in range(5)
        for protocol in ("unknown", "inside")
        for label, budget in arms
    ]
    fields = ("task", "length", "seed", "protocol", "label", "budget", "id")
    told = [tuple(answer[name] for name in fields) for answer in answers]
    assert told[: len(expected)] == expected
    rest = told[len(expected) :]
    assert [line[:6] for line in rest] == [
        ("together", length, seed, "inside", label, budget)
        for length in (10, 20)
        for seed in (3, 1)
        for label, budget in arms
        for _ in range(5)
    ]
    # Batches are of like length.
    for at in range(0, len(rest), 5):
        lengths = [answer["prompt_tokens"] for answer in answers[len(expected) + at :][:5]]
        assert lengths == sorted(lengths)
    assert answers[1]["options"] == {"count_prefix": True}


@hypothesis_settings(max_examples=25)
@given(data=st.data())
def test_a_run_cut_anywhere_ends_with_the_same_bytes(
    data: Any, plain: bytes, base: str, loaded: Any, tmp_path_factory: Any
) -> None:
    out = tmp_path_factory.mktemp("cut") / "a.jsonl"
    for _ in range(2):  # killed twice
        out.write_bytes(plain[: data.draw(st.integers(0, len(plain)))])
        with patched():
            evaluate(faked(base), out, loader=lambda name: loaded)
        assert out.read_bytes() == plain


def test_what_is_there_is_not_answered_again(
    plain: bytes, base: str, fakes: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "a.jsonl"
    out.write_bytes(b"".join(plain.splitlines(keepends=True)[:-3]))
    asked: list[int] = []

    def counted(*given: Any) -> Any:
        replies = fake_answer(*given)
        asked.append(len(replies))
        return replies

    monkeypatch.setattr(cells, "answer", counted)
    evaluate(faked(base), out, loader=fakes)
    assert asked == [2, 1]  # of the last but one batch a line is there
    assert len(read_timings(out)) == 3
    evaluate(faked(base), out, loader=fakes)
    assert asked == [2, 1] and out.read_bytes() == plain


@pytest.mark.parametrize("world", [2, 3])
def test_parts_come_together_as_one_run(
    plain: bytes, base: str, fakes: Any, tmp_path: Path, world: int
) -> None:
    out = tmp_path / "a [1].jsonl"
    shares = [Share(rank, world) for rank in range(world)]
    for share in shares[1:]:
        evaluate(faked(base), out, share=share, loader=fakes)
        part = part_path(out, share)
        whole = part.read_bytes()
        for size in (len(whole) - 7, len(whole) // 2, 60):  # and each part goes on
            part.write_bytes(whole[:size])
            evaluate(faked(base), out, share=share, loader=fakes)
            assert part.read_bytes() == whole
    with pytest.raises(ValueError, match=f"{world} processes began this run"):
        evaluate(faked(base), out, loader=fakes)
    evaluate(faked(base), out, share=shares[0], loader=fakes)
    assert out.read_bytes() == plain
    assert len(read_timings(out)) == len(read(out).answers)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "a [1].jsonl",
        "a [1].timing.jsonl",
    ]
    with pytest.raises(ValueError, match="go on without --devices"):
        evaluate(faked(base), out, share=shares[0], loader=fakes)


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"n": 6}, "n: 5 there, 6 now"),
        ({"budgets": [0.25]}, r"budgets: \[0.25, 64\] there, \[0.25\] now"),
        ({"policies": ["full"]}, "policies: "),
        ({"precision": "bf16"}, "precision: 'fp32' there, 'bf16' now"),
    ],
)
def test_other_settings_are_refused(
    plain: bytes, base: str, fakes: Any, tmp_path: Path, given: Any, named: str
) -> None:
    out = tmp_path / "a.jsonl"
    out.write_bytes(plain)
    with pytest.raises(ValueError, match=named):
        evaluate(faked(base, **given), out, loader=fakes)
    assert out.read_bytes() == plain


def test_an_answer_that_lacks_a_field_is_not_gone_on_with(
    plain: bytes, base: str, fakes: Any, tmp_path: Path
) -> None:
    out = tmp_path / "a.jsonl"
    lines = plain.splitlines(keepends=True)[:3]
    line = json.loads(lines[2])
    del line["budget"]
    out.write_bytes(b"".join(lines[:2]) + json.dumps(line).encode() + b"\n")
    there = out.read_bytes()
    with pytest.raises(ValueError, match=r"a\.jsonl:3: this answer lacks the field budget$"):
        evaluate(faked(base), out, loader=fakes)
    assert out.read_bytes() == there


def test_what_is_no_results_file_is_refused(base: str, fakes: Any, tmp_path: Path) -> None:
    out = tmp_path / "a.jsonl"
    for text, named in (('{"kind": "answer"}\n', "no header"), ("[1]\n", "a.jsonl:1: this is no")):
        out.write_text(text)
        with pytest.raises(ValueError, match=named):
            evaluate(faked(base), out, loader=fakes)
        assert out.read_text() == text


def test_a_full_disk_loses_nothing(
    plain: bytes, base: str, fakes: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, synced = tmp_path / "a.jsonl", []

    def sync(number: int) -> None:
        synced.append(number)
        if len(synced) == 40:
            raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(writing.os, "fsync", sync)
    with pytest.raises(OSError, match="no space left on the disk.*run the same command again"):
        evaluate(faked(base), out, loader=fakes)
    there = out.read_bytes()
    assert there.endswith(b"\n") and plain.startswith(there) and len(there) < len(plain)
    evaluate(faked(base), out, loader=fakes)
    assert out.read_bytes() == plain


def test_a_failed_check_leaves_no_figures(
    base: str, fakes: Any, plain: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "a.jsonl"
    with monkeypatch.context() as patch:
        patch.setattr(runner, "check_full", lambda *given: {**CHECK, "ok": False})
        with pytest.raises(CheckFailed, match="full: full is sane: not so"):
            evaluate(faked(base), out, loader=fakes)
        assert [check["ok"] for check in read(out).checks] == [False]
        assert not read(out).answers
    evaluate(faked(base), out, loader=fakes)  # checked anew
    assert out.read_bytes() == plain


def test_settings_that_came_to_no_answer_bind_nobody(
    base: str, fakes: Any, plain: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "a.jsonl"
    with pytest.raises(ValueError, match="budget=9.0"):
        evaluate(
            faked(base, policies=[{"policy": "h2o", "options": {"budget": 9.0}}]), out, loader=fakes
        )
    with monkeypatch.context() as patch:
        patch.setattr(runner, "check_full", lambda *given: {**CHECK, "ok": False})
        with pytest.raises(CheckFailed):
            evaluate(faked(base, n=2), out, loader=fakes)
    assert len(read(out).checks) == 1
    evaluate(faked(base), out, loader=fakes)
    assert out.read_bytes() == plain


def test_two_runs_do_not_write_one_file(
    base: str, fakes: Any, plain: bytes, tmp_path: Path
) -> None:
    out = tmp_path / "a.jsonl"
    out.write_bytes(plain[:-7])
    with writing.LineFile(out):
        there = out.read_bytes()
        with pytest.raises(ValueError, match="a.jsonl: another run is writing it"):
            evaluate(faked(base), out, loader=fakes)
        assert out.read_bytes() == there
    evaluate(faked(base), out, loader=fakes)
    assert out.read_bytes() == plain


def test_models_take_turns(base: str, loaded: Any, tmp_path: Path) -> None:
    settings = faked(
        base,
        policies=["full", {"policy": "h2o", "model": "other"}, {"policy": "tova", "model": "idle"}],
        tasks=[{"task": "echo", "policies": ["full", "h2o"], "batch_size": 1}],
    )
    asked: list[str] = []

    def loader(name: str) -> Any:
        asked.append(name)
        return loaded

    with patched():
        evaluate(settings, tmp_path / "a.jsonl", loader=loader)
    found = read(tmp_path / "a.jsonl")
    # One at a time: fingerprints, checks, answers. A model that answers nothing isn't loaded.
    assert asked == ["other", base, "other", base, "other"]
    assert set(found.header["fingerprint"]) == {base, "other"} and len(found.checks) == 2
    labels = [answer["label"] for answer in found.answers]
    assert labels == ["full"] * 40 + ["h2o"] * 80


def test_a_task_may_be_told_its_longest_answer(loaded: Any) -> None:
    for told, longest in ((None, 4), (2, 2)):
        cell = Cell(
            given=TaskSettings("echo", max_new_tokens=told),
            task=EchoTask(),
            length=None,
            seed=0,
            n=3,
            batch_size=1,
            protocols=["inside"],
            arms=[],
            model=loaded[0],
            tokenizer=loaded[1],
        )
        assert [question.max_new_tokens for question in cell.questions] == [longest] * 3
    with pytest.raises(ValueError, match="echo: max_new_tokens: 0 is no whole number"):
        TaskSettings("echo", max_new_tokens=0)


# -- with a model ---------------------------------------------------------------------------------


def real(base: str, **given: Any) -> Settings:
    return Settings.of(
        {
            "model": base,
            "policies": ["full", "streaming_llm", "h2o"],
            "budgets": [0.25],
            "lengths": [360],
            "n": 2,
            "tasks": [
                "needle",
                {
                    "task": "ledger",
                    "lengths": [None],
                    "batch_size": 2,
                    "protocols": ["inside"],
                    "options": {"steps": [3, 4], "max_new_tokens": 12},
                },
                {"task": "fidelity", "lengths": [None], "options": {"tokens": 12}},
            ],
            **given,
        }
    )


@pytest.fixture(scope="module")
def answered(base: str, loaded: Any, tmp_path_factory: Any) -> Any:
    out = tmp_path_factory.mktemp("real") / "a.jsonl"
    evaluate(real(base), out, loader=lambda name: loaded)
    return read(out), out


def test_checks_come_first_and_hold(answered: Any) -> None:
    checks = [(check["policy"], check["what"], check["ok"]) for check in answered[0].checks]
    assert checks == [
        ("full", "full is sane", True),
        ("streaming_llm", "binds nothing equals full", True),
        ("streaming_llm", "tiny differs", True),
        ("h2o", "binds nothing equals full", True),
        ("h2o", "tiny differs", True),
    ]


def test_bytes_are_those_of_the_budget(answered: Any) -> None:
    answers = answered[0].answers
    assert len(answers) == 3 * 2 * (2 + 1 + 1)
    for answer in answers:
        if answer["policy"] == "full":
            assert answer["device_bytes_peak"] == answer["full_bytes"]
        else:
            assert answer["device_bytes_peak"] <= 0.25 * answer["full_bytes"]
        assert 0 < answer["device_bytes_mean"] <= answer["device_bytes_peak"]


def test_batches_are_answered_as_the_generator_does(answered: Any, loaded: Any) -> None:
    from zoomkv.evaluation.tasks.registry import task

    questions = task("ledger", steps=(3, 4), max_new_tokens=12).questions(2, None, 0, len)
    for policy, options in (("full", {}), ("h2o", {"budget": 0.25, "count_prefix": True})):
        generator = Generator(*loaded, policy, **options)
        texts = {
            one.id: answer.text
            for one, answer in zip(
                questions, generator.generate([one.prompt for one in questions], 12), strict=True
            )
        }
        found = [a for a in answered[0].answers if (a["task"], a["policy"]) == ("ledger", policy)]
        assert {answer["id"]: answer["text"] for answer in found} == texts


def test_the_full_cache_is_faithful_to_itself(answered: Any) -> None:
    found = [answer for answer in answered[0].answers if answer["task"] == "fidelity"]
    full = [answer for answer in found if answer["policy"] == "full"]
    assert all(answer["about"]["kl"] < 1e-6 and answer["score"] == 1 for answer in full)
    others = [answer["about"]["kl"] for answer in found if answer["policy"] != "full"]
    assert min(others) > 1e-4


def test_the_same_seed_gives_the_same_bytes(answered: Any, base: str, loaded: Any) -> None:
    _, out = answered
    whole = out.read_bytes()
    out.write_bytes(whole[: len(whole) // 2])
    evaluate(real(base), out, loader=lambda name: loaded)
    assert out.read_bytes() == whole
    assert timing_path(out).exists()


def test_an_arm_is_tuned_to_the_bytes_of_another(base: str, loaded: Any, tmp_path: Path) -> None:
    out = tmp_path / "a.jsonl"
    reference = {"policy": "h2o", "budgets": [0.4], "match": ["streaming_llm"]}
    tasks = real(base).tasks[:2]
    settings = replace(real(base, policies=["full", reference]), tasks=tasks)
    evaluate(settings, out, loader=lambda name: loaded)
    whole = out.read_bytes()
    for task in ("needle", "ledger"):
        held = {"h2o": 0.0, "streaming_llm at h2o's bytes": 0.0, "full": 0.0}
        for answer in read(out).answers:
            if answer["task"] == task and answer["protocol"] == "inside":
                held[answer["label"]] += answer["device_bytes_mean"]
                if answer["policy"] == "streaming_llm":
                    assert type(answer["budget"]) is int
        tuned, own = held["streaming_llm at h2o's bytes"], held["h2o"]
        assert tuned == pytest.approx(own, rel=0.1) and own < 0.6 * held["full"]
    out.write_bytes(whole[:-10])
    evaluate(settings, out, loader=lambda name: loaded)
    assert out.read_bytes() == whole


def test_a_policy_that_ignores_its_budget_is_found_out(
    base: str, loaded: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from zoomkv.caches.registry import POLICIES

    monkeypatch.setitem(POLICIES, "idle", "tests.evaluation.fakes:IdleCache")
    with pytest.raises(CheckFailed, match="idle: tiny differs: not so"):
        settings = real(base, policies=["full", "idle"])
        evaluate(settings, tmp_path / "a.jsonl", loader=lambda name: loaded)


def test_a_policy_that_drops_rows_whatever_its_budget_is_found_out(
    base: str, loaded: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from zoomkv.caches.registry import POLICIES

    monkeypatch.setitem(POLICIES, "greedy", "tests.evaluation.fakes:GreedyCache")
    with pytest.raises(CheckFailed, match="greedy: binds nothing equals full: not so"):
        settings = real(base, policies=["full", "greedy"])
        evaluate(settings, tmp_path / "a.jsonl", loader=lambda name: loaded)


# -- arms -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", names())
def test_every_policy_can_be_checked(policy: str) -> None:
    [arm] = arms_of(Settings.of({"policies": [policy]}))
    loose, small = unbinding(arm), tight(arm)
    if policy in ("full", "full_offloaded"):
        assert not small
    else:
        assert loose is not None and loose != small


@pytest.mark.parametrize("policy", names())
def test_everything_counts_within_a_budget(policy: str) -> None:
    [arm] = arms_of(Settings.of({"policies": [policy], "budgets": [0.1, 0.2]}))
    known = options_of(policy)
    assert arm.budgets == ((0.1, 0.2) if known.get("budget") else (None,))
    assert arm.options.get("count_prefix", True) is True
    assert ("count_prefix" in arm.options) == ("count_prefix" in known)


def test_an_artifact_brings_its_options() -> None:
    folder = "checkpoints/zoomr-smollm2-135m"
    settings = Settings.of(
        {
            "policies": [
                "full",
                {
                    "policy": "zoomr",
                    "model": folder,
                    "options": {"top_k": 3},
                    "match": ["h2o", "sumr"],
                },
                "h2o",
            ]
        }
    )
    arms = {arm.label: arm for arm in arms_of(settings)}
    assert list(arms) == [
        "full",
        "zoomr top_k=3",
        "h2o",
        "h2o at zoomr top_k=3's bytes",
        "sumr at zoomr top_k=3's bytes",
    ]
    assert arms["zoomr top_k=3"].options == {"window": 64, "consensus": 2, "top_k": 3}
    assert arms["h2o at zoomr top_k=3's bytes"].model == folder
    assert arms["h2o"].model == "smollm2-135m"


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"policies": ["h3o"]}, "unknown policy 'h3o'.*did you mean 'h2o'"),
        ({"policies": [{"policy": "h2o", "options": {"recnt": 3}}]}, "did you mean 'recent'"),
        ({"policies": [{"policy": "sumr", "budgets": [0.1]}]}, "sumr: this policy has no budget"),
        ({"policies": [{"policy": "full", "match": ["full_offloaded"]}]}, "neither budget nor"),
        ({"policies": ["h2o"], "budgets": []}, "budgets: name at least one, for h2o"),
        ({"policies": ["tests.evaluation.fakes:NeedyCache"]}, "it needs the option 'width'"),
    ],
)
def test_bad_arms_are_refused(given: Any, named: str) -> None:
    with pytest.raises(ValueError, match=named):
        arms_of(Settings.of(given))


def test_a_length_that_a_task_cannot_have_is_told_first(
    base: str, loaded: Any, tmp_path: Path
) -> None:
    settings = real(base, tasks=["needle", "variable_tracking"], lengths=[360])
    with pytest.raises(ValueError, match="variable tracking length=360: the shortest prompt"):
        evaluate(settings, tmp_path / "a.jsonl", loader=lambda name: loaded)
    assert [line["kind"] for line in map(json.loads, (tmp_path / "a.jsonl").open())] == ["header"]
