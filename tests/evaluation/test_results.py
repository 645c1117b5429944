"""A table against counts by hand, and files that are whole, torn or something else."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from zoomkv.evaluation.results import (
    budget_text,
    check_fields,
    dump,
    empty_warning,
    read,
    read_timings,
    rows,
    table,
    timing_path,
)
from zoomkv.evaluation.statistics import wilson
from zoomkv.evaluation.writing import LineFile

HEADER = {"kind": "header", "format": 1, "zoomkv": "0", "model": "m", "settings": {}}


def answer(id: str, **given: Any) -> dict[str, Any]:
    line = {
        "kind": "answer",
        "task": "needle",
        "policy": "h2o",
        "label": "h2o",
        "options": {},
        "budget": 0.1,
        "protocol": "unknown",
        "length": 100,
        "depth": None,
        "seed": 0,
        "id": id,
        "score": 1.0,
        "right": True,
        "extracted": True,
        "truncated": False,
        "tokens": 4,
        "prompt_tokens": 90,
        "device_bytes_mean": 10.0,
        "device_bytes_peak": 20.0,
        "host_bytes": 1.0,
        "bytes_to_device": 2.0,
        "bytes_to_host": 4.0,
        "full_bytes": 100.0,
        "agreeability": None,
        "about": {},
        "text": "t",
    }
    return line | given


def timing(line: dict[str, Any], seconds: float, batch: int) -> dict[str, Any]:
    names = ("task", "label", "budget", "protocol", "length", "seed", "id")
    named = {name: line[name] for name in names}
    return {"kind": "timing", **named, "seconds": seconds, "batch": batch}


def test_rows_by_hand() -> None:
    answers = [
        answer("a"),
        answer("c", budget=None, policy="full", label="full"),
        answer("b", score=0.5, right=False, tokens=8, device_bytes_peak=40.0, full_bytes=150.0),
        answer("a", seed=3, right=False, score=0.0, extracted=False, truncated=True, text=" \n"),
        answer("a", budget=1),
        answer("a", budget=1.0),
    ]
    timings = [timing(answers[0], 9.0, 1), timing(answers[0], 4.0, 2), timing(answers[2], 8.0, 2)]
    found = rows(answers, timings)
    assert [(row.label, row.budget, row.n) for row in found] == [
        ("h2o", 0.1, 3),
        ("h2o", 1, 1),
        ("h2o", 1.0, 1),
        ("full", None, 1),
    ]
    row = found[0]
    assert (row.score, row.right, row.interval) == (0.5, 1, wilson(1, 3))
    assert (row.extracted, row.not_extracted, row.truncated, row.empty) == (2, 1, 1, 1)
    assert row.seeds == (0, 3) and row.tokens == pytest.approx(16 / 3)
    assert row.device_bytes_mean == 10 and row.device_bytes_peak == 40
    assert row.share == pytest.approx(80 / 350)
    assert (row.host_bytes, row.bytes_to_device, row.bytes_to_host) == (1, 2, 4)
    assert row.tokens_per_second == pytest.approx(12 / 6)  # of two answers, the last timing of each
    assert found[1].tokens_per_second is None
    assert empty_warning(found) == (
        "1 of 6 answers are empty, most of them in needle, h2o, 10 %: 1 of 3"
    )
    assert empty_warning(found[1:]) is None


def test_rows_stand_in_the_order_of_the_run() -> None:
    keys = [("a", 2, "unknown"), ("a", 2, "inside"), ("a", 1, "unknown"), ("b", 2, "unknown")]
    answers = [
        answer("x", task=task, length=length, protocol=protocol, label=label)
        for task, length, protocol in keys
        for label in ("full", "h2o")
    ]
    found = [(row.task, row.length, row.protocol, row.label) for row in rows(answers)]
    assert found == [(*key, label) for key in keys for label in ("full", "h2o")]


def test_a_table_has_a_line_for_each_row() -> None:
    lines = table(rows([answer("a"), answer("a", label="h2o 2")])).splitlines()
    assert lines[0].count("|") == lines[1].count("|") == lines[2].count("|")
    assert lines[2].startswith("| needle | 100 | unknown | h2o | 10 % | 1 | 0 | 1.000 | 1 (21 to")
    assert "| 20.0 % |" in lines[2] and "h2o 2" in lines[3]


def test_what_compares_distributions_is_not_judged_whatever_its_name() -> None:
    line = answer("a", task="near|far", right=False, about={"kl": 0.1, "curve": {"kl": [0.1]}})
    (row,) = found = rows([line], [timing(line, 1.0, 1)])
    assert not row.judged and row.tokens_per_second is None
    cells = table(found).splitlines()[2].split(" | ")
    assert cells[0] == "| near\\|far" and cells[8:12] == ["", "", "", ""]
    assert "| x\\|y |" in table(rows([answer("b", label="x|y")]))


def test_files_are_read_up_to_a_torn_line(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    check = {"kind": "check", "policy": "h2o", "what": "tiny differs", "ok": True, "detail": ""}
    whole = b"".join(map(dump, [HEADER, check, answer("é")]))
    path.write_bytes(whole)
    found = read(path)
    assert (found.header, len(found.checks), found.answers[0]["id"]) == (HEADER, 1, "é")
    path.write_bytes(whole + b'{"kind": "ans')
    with pytest.warns(UserWarning, match="a.jsonl:4: the last line is torn"):
        assert read(path) == found
    assert read_timings(path) == []
    timed = timing(answer("é"), 1.0, 1)
    timing_path(path).write_bytes(dump(timed) + b"{")
    assert read_timings(path) == [timed]


@pytest.mark.parametrize(
    ("data", "named"),
    [
        (b"", "no results of zoomkv evaluate"),
        (dump(answer("a")), "no results of zoomkv evaluate"),
        (dump({**HEADER, "format": 2}), "format 2, and this version reads 1"),
        (dump(HEADER) + b"torn\n" + dump(answer("a")), "a.jsonl:2: this is no line"),
    ],
)
def test_other_files_are_refused(tmp_path: Path, data: bytes, named: str) -> None:
    path = tmp_path / "a.jsonl"
    with pytest.raises(ValueError, match="there is no such"):
        read(path)
    path.write_bytes(data)
    with pytest.raises(ValueError, match=named):
        read(path)


@pytest.mark.parametrize("name", [name for name in answer("a") if name != "kind"])
def test_an_answer_that_lacks_a_field_is_named(tmp_path: Path, name: str) -> None:
    path, line = tmp_path / "a.jsonl", answer("b")
    del line[name]
    path.write_bytes(b"".join(map(dump, [HEADER, answer("a"), line])))
    with pytest.raises(ValueError, match=rf"a\.jsonl:3: this answer lacks the field {name}$"):
        read(path)


CURVE = {"position": [0], "kl": [0.1], "top1": [1.0]}


@pytest.mark.parametrize(
    ("line", "named"),
    [
        ({"kind": "check", "policy": "h2o", "ok": True}, "1: this check lacks the field what"),
        (answer("a", about=None), "1: about of this answer is no object"),
        (answer("a", about={"curve": CURVE}), "1: this answer lacks the field about.kl"),
        (
            answer("a", about={"kl": 0.1, "curve": {"kl": [0.1], "position": [0]}}),
            "1: this answer lacks the field about.curve.top1",
        ),
        ({"kind": "header"}, "1: this header lacks the field model"),
        (
            {**HEADER, "settings": {"model": "m", "tasks": [{"task": "needle"}]}},
            r"1: this header lacks the field settings.tasks\[0\].name",
        ),
        (
            {**HEADER, "settings": {"model": "m", "policies": [{"policy": "h2o"}]}},
            r"1: this header lacks the field settings.policies\[0\].options",
        ),
        ({**HEADER, "settings": None}, "1: settings of this header is no object"),
        (
            {**HEADER, "settings": {"policies": [{"policy": "h2o"}]}},
            "1: this header lacks the field settings.model",
        ),
        ({"kind": "timing", "task": "needle"}, "1: this timing lacks the field label"),
    ],
)
def test_other_lines_that_lack_a_field(line: Any, named: str) -> None:
    with pytest.raises(ValueError, match=f"^a.jsonl:{named}$"):
        check_fields([line], Path("a.jsonl"))


def test_timings_that_lack_a_field_are_named(tmp_path: Path) -> None:
    line = timing(answer("a"), 1.0, 1)
    del line["batch"]
    timing_path(tmp_path / "a.jsonl").write_bytes(dump(line))
    with pytest.raises(ValueError, match=r"a\.timing\.jsonl:1: this timing lacks the field batch$"):
        read_timings(tmp_path / "a.jsonl")


def test_lines_of_other_kinds_are_left_alone() -> None:
    check_fields([HEADER, {"kind": "unit"}, {"kind": ["odd"]}, answer("a")], Path("a.jsonl"))


def test_an_arm_that_is_tuned_is_one_row_over_its_seeds() -> None:
    label = "h2o at zoomr's bytes"
    answers = [
        answer(str(at), seed=seed, label=label, budget=budget, length=length, right=budget > 40)
        for length, budgets in ((100, (40, 41, 45)), (200, (80, 80, 80)))
        for seed, budget in enumerate(budgets)
        for at in range(2)
    ]
    answers += [answer("a", budget=40), answer("a", budget=41)]
    answers += [answer("a", label=f"sumr{label[3:]}", policy="sumr", budget=None)]
    timings = [timing(line, 2.0, 1) for line in answers]
    found = rows(answers, timings, {label, f"sumr{label[3:]}"})
    assert [(row.label, row.length, row.budget, row.tuned, row.n) for row in found] == [
        (label, 100, None, 42.0, 6),
        ("h2o", 100, 40, None, 1),
        ("h2o", 100, 41, None, 1),
        ("sumr at zoomr's bytes", 100, None, None, 1),
        (label, 200, None, 80.0, 6),
    ]
    assert found[0].seeds == (0, 1, 2) and found[0].right == 4
    assert found[0].tokens_per_second == 2.0  # timings are found by the budget of each seed
    lines = table(found).splitlines()
    assert f"| {label} | 42 rows, tuned | 6 | 0, 1, 2 |" in lines[2]
    assert len(rows(answers)) == 7  # known by their labels alone


def test_budgets_as_read() -> None:
    budgets = [None, 0.05, 0.125, 1.0, 1, 1024]
    assert [budget_text(budget, None) for budget in budgets] == [
        None, "5 %", "12.5 %", "100 %", "1 rows", "1,024 rows",
    ]  # fmt: skip
    assert [budget_text(None, tuned) for tuned in (63.5, 1024.0, 42 + 1 / 3)] == [
        "63.5 rows, tuned", "1,024 rows, tuned", "42.3 rows, tuned",
    ]  # fmt: skip


def test_a_line_file_goes_on_behind_whole_lines(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "a.jsonl"
    with LineFile(path) as file:
        assert file.lines == []
        file.append([HEADER, answer("a")])
    with open(path, "ab") as torn:
        torn.write(b'{"kind"')
    with LineFile(path) as file:
        assert file.lines == [HEADER, answer("a")]
        file.append([answer("b")])
        file.keep(1)
        file.append([answer("c")])
    assert [json.loads(line).get("id") for line in path.read_bytes().splitlines()] == [None, "c"]


def test_numbers_that_json_lacks_are_no_results() -> None:
    with pytest.raises(ValueError):
        dump({"score": float("nan")})
