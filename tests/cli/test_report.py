"""``zoomkv report``: the files it writes, what it says, what it refuses."""

from __future__ import annotations

import csv
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.evaluation.report.synthetic import answer, checks, comparison, write_results

from zoomkv.cli import main

FILES = ["index.html", "report.json", "table.csv", "table.md"]


@pytest.fixture
def results(tmp_path: Path) -> Path:
    answers, timings = comparison(["full", "h2o", "zoomr"], (0.1, 0.2), 1)
    return write_results(tmp_path / "made.jsonl", [*checks(), *answers], timings)


def run(capsys: Any, *words: object) -> tuple[int, str, str]:
    code = main(["report", *map(str, words)])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_writes_the_files(results: Path, tmp_path: Path, capsys: Any) -> None:
    out = tmp_path / "deep" / "out"
    code, said, err = run(capsys, results, "--out", out)
    assert code == 0 and err == ""
    assert sorted(path.name for path in out.iterdir()) == FILES
    numbers = json.loads((out / "report.json").read_text(encoding="utf-8"))
    assert numbers["command"] == f"zoomkv report {results} --out {out}"
    assert numbers["checks"][1]["ok"] is False and numbers["model"] == "checkpoints/made-up"
    with open(out / "table.csv", encoding="utf-8", newline="") as file:
        table = list(csv.DictReader(file))
    assert (
        len(table) == len(numbers["rows"]) == len((out / "table.md").read_text().splitlines()) - 2
    )
    answers = sum(row["n"] for row in numbers["rows"])
    listed = "report.json, table.md, table.csv, index.html"
    assert said == f"{out}: {listed} ({answers} answers in {len(table)} rows)\n"


def test_a_pattern_may_name_the_timings_too(results: Path, tmp_path: Path, capsys: Any) -> None:
    names = sorted(results.parent.glob("*.jsonl"))
    assert [path.name for path in names] == ["made.jsonl", "made.timing.jsonl"]
    assert run(capsys, results, "--out", tmp_path / "one")[0] == 0
    code, _, err = run(capsys, *names, "--out", tmp_path / "two")
    assert (code, err) == (0, "")
    tables = [(tmp_path / name / "table.csv").read_bytes() for name in ("one", "two")]
    assert tables[0] == tables[1]
    code, _, err = run(capsys, names[1], "--out", tmp_path / "three")
    assert code == 2 and "its first line is no header" in err  # timings alone are no results


def test_a_line_that_lacks_a_field_is_named(results: Path, tmp_path: Path, capsys: Any) -> None:
    foreign = tmp_path / "foreign.jsonl"
    head = results.read_text(encoding="utf-8").splitlines()[0]
    line = answer()
    del line["full_bytes"]
    foreign.write_text(f"{head}\n{json.dumps(line)}\n", encoding="utf-8")
    code, said, err = run(capsys, foreign, "--out", tmp_path / "out")
    assert (code, said) == (2, "")
    assert err == f"zoomkv: {foreign}:2: this answer lacks the field full_bytes\n"


def test_the_same_results_give_the_same_files(results: Path, tmp_path: Path, capsys: Any) -> None:
    out = tmp_path / "out"
    kept = []
    for _ in range(2):  # the second time, the folder and all files are there already
        assert run(capsys, results, "--out", out)[0] == 0
        kept.append({path.name: path.read_bytes() for path in out.iterdir()})
    assert kept[0] == kept[1] and sorted(kept[0]) == FILES


def test_a_torn_last_line_is_left_out_and_told(results: Path, tmp_path: Path, capsys: Any) -> None:
    assert run(capsys, results, "--out", tmp_path / "whole")[0] == 0
    with open(results, "ab") as file:
        file.write(json.dumps(answer(id="torn")).encode()[:-40])
    code, _, err = run(capsys, results, "--out", tmp_path / "torn")
    assert code == 0 and len(err.splitlines()) == 1
    assert err.startswith(f"{results}:") and "the last line is torn" in err
    tables = [(tmp_path / name / "table.csv").read_bytes() for name in ("whole", "torn")]
    assert tables[0] == tables[1]
    assert "the last line is torn" in (tmp_path / "torn" / "index.html").read_text("utf-8")


@pytest.mark.parametrize(
    ("header", "message"),
    [({"format": 2}, "format 2"), ({"model": "another"}, "can't be in one report: model is")],
)
def test_what_does_not_go_together_is_refused(
    results: Path, tmp_path: Path, capsys: Any, header: dict[str, Any], message: str
) -> None:
    other = write_results(tmp_path / "other.jsonl", [answer()], **header)
    code, said, err = run(capsys, results, other, "--out", tmp_path / "out")
    assert code == 2 and said == "" and not (tmp_path / "out").exists()
    assert len(err.splitlines()) == 1 and message in err and str(other) in err


def test_other_bad_input(results: Path, tmp_path: Path, capsys: Any) -> None:
    missing = tmp_path / "missing.jsonl"
    text = tmp_path / "text.jsonl"
    text.write_text("no results\n", encoding="utf-8")
    file = tmp_path / "file"
    file.write_text("", encoding="utf-8")
    for words in (
        [missing, "--out", tmp_path / "out"],
        [text, "--out", tmp_path / "out"],
        [results, "--out", file],
        [results],
        ["--out", tmp_path / "out"],
    ):
        code, said, err = run(capsys, *words)
        assert code == 2 and said == "" and len(err.splitlines()) == 1


def test_a_write_that_fails_leaves_the_old_file_whole(
    results: Path, tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    assert run(capsys, results, "--out", out)[0] == 0
    before = {path.name: path.read_bytes() for path in out.iterdir()}
    write = Path.write_text

    def fail(path: Path, text: str, **options: Any) -> int:
        write(path, text[: len(text) // 2], **options)
        raise OSError("no space left")

    monkeypatch.setattr(Path, "write_text", fail)
    code, _, err = run(capsys, results, "--out", out)
    assert code == 2 and "no space left" in err
    assert {path.name: path.read_bytes() for path in out.iterdir()} == before


def test_help_imports_nothing_heavy() -> None:
    code = (
        "import sys\nfrom zoomkv.cli import main\ntry:\n    main(['report', '--help'])\n"
        "except SystemExit:\n    pass\n"
        "print(sorted({'torch', 'transformers', 'lightning', 'matplotlib'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "--out DIR" in done.stdout and done.stdout.splitlines()[-1] == "[]"
