"""``zoomkv inspect`` on a tiny model: the files it writes, what it says, what it refuses."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from zoomkv.cli import main
from zoomkv.data.traces import Segment, Trace, write_traces
from zoomkv.evaluation.figure_numbers import figure_numbers
from zoomkv.evaluation.inspection import Rules, inspect_tokens
from zoomkv.evaluation.passages import read_source, tokenise
from zoomkv.generation import load

FIGURES = [
    "1a_attention_map",
    "1b_distances",
    "2_top_keys",
    "3_global_queries",
    "4a_similarity",
    "4b_plane",
    "6a_coverage",
]
NEAR = ["--window", "20", "--fraction", "0.3", "--top-k", "7"]
"""What makes some queries of a short text global."""


def trace(name: str, steps: int) -> Trace:
    segments = tuple(Segment(f"Step {n}\n{n}+{n % 7}={n + n % 7}") for n in range(steps))
    return Trace(f"Start at {name}. What is the total?", segments, f"Total {steps}.", id=name)


@pytest.fixture
def traces(tmp_path: Path) -> str:
    path = tmp_path / "some.jsonl"
    write_traces(path, [trace("one", 12), trace("two", 4)])
    return str(path)


def run(capsys: Any, *words: str) -> tuple[int, str, str]:
    code = main(["inspect", *words])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def read(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8"))


def test_writes_pictures_with_their_numbers(
    base: str, traces: str, tmp_path: Path, capsys: Any
) -> None:
    out = tmp_path / "deep" / "out"
    code, said, _ = run(capsys, traces, "--model", base, "--out", str(out), *NEAR)
    names = [f"{name}.{kind}" for name in FIGURES for kind in ("json", "png")]
    assert code == 0
    assert sorted(path.name for path in out.iterdir()) == sorted([*names, "inspection.json"])
    for name in FIGURES:
        with Image.open(out / f"{name}.png") as picture:
            picture.load()
            assert picture.format == "PNG" and picture.width == 1600

    model, tokenizer = load(base)
    passage = tokenise(read_source(traces), tokenizer, 4096, traces)
    found = inspect_tokens(
        model, passage.ids, passage.prompt, Rules(top_k=7, window=20, fraction=0.3)
    )
    figures, _ = figure_numbers(found, [tokenizer.decode([token]) for token in passage.ids])
    assert found.counts.any()
    for name in FIGURES:
        assert read(out / f"{name}.json") == figures[name]
    summary = read(out / "inspection.json")
    start, end = found.interval
    expected = {
        "trace": traces,
        "row": 0,
        "model": base,
        "tokens": len(passage.ids),
        "prompt_tokens": passage.prompt,
        "interval": [start, end],
        "stretch": list(found.stretch),
        "layer": found.head.layer,
        "head": found.head.head,
        "chosen": "the most global queries, of heads where they are no majority if any",
        "global_queries": sum(map(sum, figures["3_global_queries"]["global_queries"])),
        "queries": (end - start) * 8,
        "figures": FIGURES,
        "notes": [],
    }
    assert {name: summary[name] for name in expected} == expected
    assert f"shown is layer {found.head.layer}, head {found.head.head}: " in said
    assert f"{len(passage.ids)} tokens, {passage.prompt} of them the prompt\n" in said
    assert said.splitlines()[-1] == (
        f"{out}: inspection.json and, each as .png and .json, {', '.join(FIGURES)}"
    )


def test_options_reach_the_numbers(base: str, traces: str, tmp_path: Path, capsys: Any) -> None:
    words = ["--layer", "1", "--head", "2", "--interval", "60", "90", "--tokens", "70", "76"]
    words += ["--seed", "3", "--out", str(tmp_path / "out"), *NEAR]
    assert run(capsys, traces, "--model", base, *words)[0] == 0
    summary = read(tmp_path / "out" / "inspection.json")
    expected = {"layer": 1, "head": 2, "interval": [60, 90], "stretch": [70, 76], "seed": 3}
    expected |= {"chosen": "as given", "top_k": 7, "window": 20, "fraction": 0.3}
    assert {name: summary[name] for name in expected} == expected
    assert read(tmp_path / "out" / "1a_attention_map.json")["positions"] == list(range(70, 76))


def test_a_plain_text_and_the_default_folder(
    base: str, tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("essay.txt").write_text("The total is 12. " * 20, encoding="utf-8")
    code, said, err = run(capsys, "essay.txt", "--model", base, "--prompt", "Why 12?")
    assert code == 0 and "inspect-essay: inspection.json" in said
    # Nothing is further away than 256 tokens: said once, and drawn all the same.
    assert err.splitlines() == [
        "no query of the text is global: none has its median distance above 256 tokens and "
        "0.25 of its position"
    ]
    summary = read(Path("inspect-essay/inspection.json"))
    assert summary["row"] is None and summary["prompt_tokens"] > 0
    assert summary["notes"] == err.splitlines() and summary["figures"] == FIGURES


def test_a_figure_that_is_not_drawn_leaves_no_old_one(
    base: str, traces: str, tmp_path: Path, capsys: Any
) -> None:
    words = [traces, "--model", base, "--out", str(tmp_path / "out"), *NEAR]
    assert run(capsys, *words)[0] == 0
    code, said, err = run(capsys, *words, "--interval", "40", "80")
    assert code == 0 and "6a_coverage is left out" in err and "6a_coverage" not in said
    assert {path.stem for path in (tmp_path / "out").iterdir()} == {*FIGURES[:-1], "inspection"}


def test_a_picture_that_fails_leaves_the_old_one_whole(
    base: str, traces: str, tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = [traces, "--model", base, "--out", str(tmp_path / "out"), *NEAR]
    assert run(capsys, *words)[0] == 0
    before = {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()}

    def fail(name: str, numbers: Any, path: Path) -> None:
        path.write_bytes(b"half")
        raise OSError(28, "No space left on device", str(path))

    monkeypatch.setattr("zoomkv.evaluation.figures.draw", fail)
    code, _, err = run(capsys, *words)
    assert code == 2 and "No space left on device" in err
    assert {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()} == before


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["/no/such.jsonl"], "/no/such.jsonl: there is no such file"),
        (["TRACES", "--row", "2"], "some.jsonl: there is no row 2"),
        (["TRACES", "--row", "-1"], "argument --row: '-1' is not a whole number of at least 0"),
        (["TRACES", "--prompt", "x"], "a trace has its own prompt, leave out --prompt"),
        (["TEXT", "--row", "1"], "--row is for traces in .jsonl or .parquet"),
        (["EMPTY"], "empty.txt: the text is empty"),
        (["LATIN"], "latin.txt: the text or its prompt is not UTF-8"),
        (["TEXT", "--prompt", "x\udcff"], "the text or its prompt is not UTF-8"),
        (["BROKEN"], "broken.jsonl:1: not valid JSON"),
        (["TEXT", "--out", "TEXT"], "File exists"),
        (["TRACES", "--layer", "2"], "layer 2: the model has layers 0 to 1"),
        (["TRACES", "--head", "4"], "head 4: the model has heads 0 to 3"),
        (["TRACES", "--tokens", "9"], "argument --tokens: expected 2 arguments"),
        (["TRACES", "--tokens", "9", "5"], "tokens 9 to 5: give START below END"),
        (["TRACES", "--interval", "0", "9999"], "interval 0 to 9999: give START below END, within"),
        (["TRACES", "--top-k", "0"], "argument --top-k: '0' is not a whole number of at least 1"),
        (["TRACES", "--fraction", "1.5"], "fraction=1.5: choose a share"),
        (["TRACES", "--fraction", "half"], "argument --fraction: 'half' is not a number"),
        (["TRACES", "--precision", "fp8"], "precision 'fp8'"),
        ([], "the following arguments are required: TRACE"),
    ],
)
def test_bad_input_is_one_line(
    base: str,
    traces: str,
    tmp_path: Path,
    capsys: Any,
    monkeypatch: pytest.MonkeyPatch,
    words: list[str],
    message: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    contents = {
        "text.txt": b"one two three",
        "empty.txt": b" \n",
        "latin.txt": b"\xe9t\xe9",
        "broken.jsonl": b"{",
    }
    for name, content in contents.items():
        Path(name).write_bytes(content)
    paths = {Path(name).stem.upper(): name for name in contents} | {"TRACES": traces}
    words = [paths.get(word, word) for word in words]
    code, out, err = run(capsys, *words, "--model", base)
    assert (code, out) == (2, "")
    [line] = err.splitlines()
    assert message in line


def test_without_matplotlib(
    base: str, traces: str, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.delitem(sys.modules, "zoomkv.evaluation.figures", raising=False)
    code, _, err = run(capsys, traces, "--model", base)
    assert code == 2
    assert err == (
        "zoomkv: zoomkv inspect draws with matplotlib, which is not installed: "
        "pip install 'zoomkv[eval]'\n"
    )


def test_help_is_light() -> None:
    code = (
        "import sys; from zoomkv.cli import main\n"
        "try: main(['inspect', '--help'])\n"
        "except SystemExit as done: assert done.code == 0\n"
        "assert not {'torch', 'matplotlib', 'rich'} & set(sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("usage: zoomkv inspect")
