"""The tables as files."""

from __future__ import annotations

import csv
import io
from pathlib import Path

from tests.evaluation.report.synthetic import answer, write_results

from zoomkv.evaluation.report.numbers import report_numbers
from zoomkv.evaluation.report.source import read_source
from zoomkv.evaluation.report.table import csv_text, markdown

ODD = 'a|b <b>"x"</b>, `c`\n*d* שלום 🐙'


def rows(folder: Path, **changes: object) -> list[dict[str, object]]:
    lines = [answer(**changes), answer(id="1", right=False, score=0.5, **changes)]
    return report_numbers([read_source(write_results(folder / "a.jsonl", lines))], "cmd")["rows"]


def test_markdown(tmp_path: Path) -> None:
    head, rule, line = markdown(rows(tmp_path)).splitlines()
    assert head.startswith("| task | policy | budget | question | length | n | right, % (95 %) |")
    assert rule.count("|") == head.count("|") == line.count("|")
    assert line.startswith("| needle | h2o | 10 % | inside | 512 | 2 | 50.0 (9.5–90.5) | 0.750 |")
    assert "KL" not in head and "tokens/s" not in head  # no row has any


def test_odd_names_stay_one_cell(tmp_path: Path) -> None:
    found = rows(tmp_path, label=ODD)
    line = markdown(found).splitlines()[2]
    assert line.replace("\\|", "").count("|") == markdown(found).splitlines()[1].count("|")
    assert "\\<b\\>" in line and "שלום 🐙" in line
    (read,) = csv.DictReader(io.StringIO(csv_text(found), newline=""))
    assert read["label"] == ODD


def test_csv_holds_every_number_unrounded(tmp_path: Path) -> None:
    found = rows(tmp_path, options={"k": 3, "a": None})
    (read,) = csv.DictReader(io.StringIO(csv_text(found), newline=""))
    assert list(read) == list(found[0])
    assert read["options"] == '{"a": null, "k": 3}'
    for name in ("n", "right", "right_low", "score", "held", "device_bytes_peak"):
        assert float(read[name]) == found[0][name]
    assert read["kl"] == "" and read["budget"] == "0.1"


def test_a_tuned_arm_shows_its_mean_budget(tmp_path: Path) -> None:
    label = "h2o at zoomr's bytes"
    arm = {"policy": "zoomr", "label": "zoomr", "options": {}, "model": None, "match": ["h2o"]}
    lines = [answer(label=label, budget=budget, seed=budget) for budget in (60, 63)]
    settings = {"model": "m", "policies": [arm]}
    path = write_results(tmp_path / "a.jsonl", lines, settings=settings)
    found = report_numbers([read_source(path)], "cmd")["rows"]
    assert f"| needle | {label} | 61.5 rows, tuned | inside |" in markdown(found)
    (read,) = csv.DictReader(io.StringIO(csv_text(found), newline=""))
    assert (read["budget"], read["tuned"]) == ("", "61.5")


def test_a_budget_of_one_row_is_not_the_whole(tmp_path: Path) -> None:
    texts = [csv_text(rows(tmp_path, budget=budget)) for budget in (1, 1.0)]
    read = [next(csv.DictReader(io.StringIO(text)))["budget"] for text in texts]
    assert read == ["1", "1.0"]
