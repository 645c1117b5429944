"""A report's numbers, against answers counted by hand."""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
from tests.evaluation.report.synthetic import (
    HEADER,
    answer,
    comparison,
    timing_of,
    write_results,
)

from zoomkv.evaluation.report.numbers import report_numbers
from zoomkv.evaluation.report.source import read_source
from zoomkv.evaluation.statistics import wilson


def numbers(folder: Path, answers: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
    return report_numbers([read_source(write_results(folder / "a.jsonl", answers, **more))], "cmd")


def test_a_comparison_counted_slowly(tmp_path: Path) -> None:
    answers, timings = comparison(["full", "h2o", "zoomr"], (0.1, 0.4), 2)
    found = numbers(tmp_path, answers, timings=timings)
    seconds = [timing["seconds"] / timing["batch"] for timing in timings]
    groups = defaultdict(list)
    for line, taken in zip(answers, seconds, strict=True):
        key = (line["task"], line["label"], line["budget"], line["protocol"], line["length"])
        groups[key].append((line, taken))
    assert len(found["rows"]) == len(groups)
    for row in found["rows"]:
        key = (row["task"], row["label"], row["budget"], row["protocol"], row["length"])
        own = [line for line, _ in groups[key]]
        right = sum(line["right"] for line in own)
        assert row["n"] == len(own)
        if row["task"] == "fidelity":
            assert row["right"] is None and row["right_low"] is None and row["extracted"] is None
            kl = sum(line["about"]["kl"] for line in own) / len(own)
            assert row["kl"] == pytest.approx(kl, rel=1e-6)
            assert row["tokens_per_second"] is None and row["timed"] == 0
        else:
            assert row["right"] == pytest.approx(right / len(own), rel=1e-6)
            interval = (row["right_low"], row["right_high"])
            assert interval == pytest.approx(wilson(right, len(own)), rel=1e-6, abs=1e-9)
        full = sum(line["full_bytes"] for line in own)
        held = sum(line["device_bytes_peak"] for line in own) / full
        assert row["held"] == pytest.approx(held, rel=1e-6)
        speed = sum(line["tokens"] for line in own) / sum(taken for _, taken in groups[key])
        if row["task"] != "fidelity":
            assert row["tokens_per_second"] == pytest.approx(speed, rel=1e-6)
            assert row["tokens_per_second_low"] < speed < row["tokens_per_second_high"]
    for needle in found["needles"]:
        row = found["rows"][needle["row"]]
        key = (row["task"], row["label"], row["budget"], row["protocol"], row["length"])
        for depth, n, right, interval in zip(
            needle["depth"], needle["n"], needle["right"], needle["interval"], strict=True
        ):
            own = [line for line, _ in groups[key] if line["depth"] == depth]
            assert (n, right) == (len(own), sum(line["right"] for line in own))
            assert interval == pytest.approx(wilson(right, n), rel=1e-6, abs=1e-9)
    (agreed,) = found["agreeability"]
    assert found["rows"][agreed["row"]]["label"] == "zoomr c=2 k=3"
    own = [line for line in answers if line["agreeability"]]
    assert agreed["right"]["answers"] == sum(line["right"] for line in own)
    assert {found["rows"][curve["row"]]["task"] for curve in found["fidelity"]} == {"fidelity"}
    assert json.loads(json.dumps(found, allow_nan=False)) == found


def test_rows_stand_by_task_length_arm_and_budget(tmp_path: Path) -> None:
    wanted = [
        ("b", "x", None, 512), ("b", "x", 0.1, 512), ("b", "x", 1.0, 512), ("b", "x", 1, 512),
        ("b", "x", 64, 512), ("b", "a", 0.1, 512), ("b", "x", 0.1, 1024), ("a", "x", 0.1, 256),
    ]  # fmt: skip
    lines = [answer(task=t, label=a, budget=b, length=n) for t, a, b, n in wanted]
    lines = [lines[0], *reversed(lines[1:5]), *lines[5:]]
    found = numbers(tmp_path, lines)["rows"]
    assert [(r["task"], r["label"], r["budget"], r["length"]) for r in found] == wanted
    assert [type(row["budget"]) for row in found[2:4]] == [float, int]


def test_tuned_arms_are_one_row_over_seeds_and_files(tmp_path: Path) -> None:
    arms = [
        {"policy": "zoomr", "label": "zoomr k=3", "options": {}, "match": ["h2o", "sumr"]},
        {"policy": "h2o", "label": "h2o recent=4", "options": {"recent": 4}, "match": []},
    ]
    settings = {**HEADER["settings"], "policies": [{"model": None, **arm} for arm in arms]}
    tuned, windowed = "h2o recent=4 at zoomr k=3's bytes", "sumr at zoomr k=3's bytes"
    sources = []
    for seed, budget in enumerate((60, 63)):
        lines = [
            answer(label=tuned, budget=budget, seed=seed, options={"recent": 4}),
            answer(label="h2o recent=4", budget=budget, seed=seed),
            answer(
                label=windowed, policy="sumr", budget=None, seed=seed, options={"window": budget}
            ),
        ]
        timings = [timing_of(line, 2.0) for line in lines]
        path = tmp_path / f"{seed}.jsonl"
        sources.append(read_source(write_results(path, lines, timings, settings=settings)))
    found = report_numbers(sources, "cmd")["rows"]
    told = [(row["label"], row["budget"], row["tuned"], row["n"], row["timed"]) for row in found]
    assert told == [
        (tuned, None, 61.5, 2, 2),
        ("h2o recent=4", 60, None, 1, 1),
        ("h2o recent=4", 63, None, 1, 1),
        (windowed, None, None, 2, 2),
    ]
    assert found[0]["options"] == {"recent": 4} and found[0]["seeds"] == [0, 1]
    assert found[3]["options"] == {"window": 61.5}


def test_many_depths_become_tenths(tmp_path: Path) -> None:
    lines = [answer(id=str(at), depth=at / 23, right=at % 2 == 0) for at in range(24)]
    (needle,) = numbers(tmp_path, lines)["needles"]
    assert needle["depth"] == [at / 10 for at in range(11)]
    assert sum(needle["n"]) == 24 and sum(needle["right"]) == 12


def test_several_files(tmp_path: Path) -> None:
    one = write_results(tmp_path / "one.jsonl", [answer(id="0"), answer(id="1", right=False)])
    two = write_results(tmp_path / "two.jsonl", [answer(id="1", right=False), answer(id="2")])
    found = report_numbers([read_source(one), read_source(two)], "cmd")
    (row,) = found["rows"]
    assert row["n"] == 3 and row["right"] == pytest.approx(2 / 3, rel=1e-6)
    assert found["warnings"] == [f"{two}: 1 answers that stand twice count once"]
    assert [source["file"] for source in found["sources"]] == ["one.jsonl", "two.jsonl"]


def test_what_can_not_be_in_one_report(tmp_path: Path) -> None:
    one = write_results(tmp_path / "one.jsonl", [answer()])
    other = write_results(tmp_path / "other.jsonl", [answer()], model="another")
    changed = {"checkpoints/made-up": {"layers": 2}}
    trained = write_results(tmp_path / "trained.jsonl", [answer()], fingerprint=changed)
    unlike = write_results(tmp_path / "unlike.jsonl", [answer(right=False)])
    newer = write_results(tmp_path / "newer.jsonl", [answer()], format=2)
    nothing = write_results(tmp_path / "nothing.jsonl", [])

    def report(*paths: Path) -> None:
        report_numbers([read_source(path) for path in paths], "cmd")

    with pytest.raises(ValueError, match='model is "checkpoints/made-up" in the one, "another"'):
        report(one, other)
    with pytest.raises(ValueError, match="trained.jsonl can't be .*: checkpoints/made-up is"):
        report(one, trained)
    with pytest.raises(ValueError, match="unlike.jsonl: .*answered otherwise in .*one.jsonl"):
        report(one, unlike)
    with pytest.raises(ValueError, match="newer.jsonl: format 2"):
        report(one, newer)
    with pytest.raises(ValueError, match="nothing.jsonl: no answers yet"):
        report(nothing)


@pytest.mark.parametrize(
    ("part", "named"),
    [
        ({"precision": "bf16"}, 'precision is "fp32" in the one, "bf16" in the other'),
        (
            {"tasks": [{"task": "needle", "name": "needle", "options": {"haystack": "book"}}]},
            'task \'needle\' is {"task": "needle", "options": {}, .*"haystack": "book"}',
        ),
        (
            {"policies": [{"policy": "h2o", "label": "h2o", "options": {"recent": 4}}]},
            'policy \'h2o\' is .*"options": {}, .* in the one, .*"recent": 4',
        ),
        ({"policies": [{"policy": "tova", "label": "h2o", "options": {}}]}, "policy 'h2o' is "),
    ],
)
def test_other_settings_are_not_pooled(tmp_path: Path, part: dict[str, Any], named: str) -> None:
    filled = {
        name: [{"model": None, "max_new_tokens": None, **each} for each in value]
        if isinstance(value, list)
        else value
        for name, value in part.items()
    }
    one = write_results(tmp_path / "one.jsonl", [answer()])
    two = write_results(
        tmp_path / "two.jsonl", [answer(seed=1)], settings={**HEADER["settings"], **filled}
    )
    with pytest.raises(ValueError, match="can't be in one report: " + named):
        report_numbers([read_source(one), read_source(two)], "cmd")


def test_seeds_and_the_run_s_own_model_are_no_other_settings(tmp_path: Path) -> None:
    arm = {"policy": "h2o", "options": {}, "label": "h2o", "model": "checkpoints/made-up"}
    settings = {**HEADER["settings"], "policies": [arm], "seeds": [1]}
    one = write_results(tmp_path / "one.jsonl", [answer()])
    two = write_results(tmp_path / "two.jsonl", [answer(seed=1)], settings=settings)
    (row,) = report_numbers([read_source(one), read_source(two)], "cmd")["rows"]
    assert row["n"] == 2 and row["seeds"] == [0, 1]


def test_arms_may_have_models_of_their_own(tmp_path: Path) -> None:
    prints = {"checkpoints/made-up": {"layers": 30, "vocabulary": 49152}, "sekv": {"layers": 3}}
    one = write_results(tmp_path / "one.jsonl", [answer()])
    two = write_results(tmp_path / "two.jsonl", [answer(label="sekv")], fingerprint=prints)
    found = report_numbers([read_source(one), read_source(two)], "cmd")
    assert found["fingerprint"] == prints and len(found["rows"]) == 2


def test_without_timings_there_is_no_speed(tmp_path: Path) -> None:
    lines = [answer(id=str(at)) for at in range(3)]
    (row,) = numbers(tmp_path, lines)["rows"]
    assert row["tokens_per_second"] is None and row["timed"] == 0
    (row,) = numbers(tmp_path, lines, timings=[timing_of(lines[0], 2.0, 4)])["rows"]
    assert row["tokens_per_second"] == 40 and row["timed"] == 1
