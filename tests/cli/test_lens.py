"""``zoomkv generate --trace`` and ``zoomkv lens``: what they write and what they refuse."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.bases import make_base

from zoomkv.cli import main
from zoomkv.evaluation.lens import page as page_module
from zoomkv.evaluation.lens.trace_file import read_trace
from zoomkv.generation import Generator, load


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> str:
    return make_base(tmp_path_factory.mktemp("base"))


@pytest.fixture(scope="module")
def trace(base: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A trace of a prompt that tries to break out of a page."""
    path = tmp_path_factory.mktemp("trace") / "answer.json"
    words = ["--policy", "h2o", "--budget", "16", "-o", "recent=4", "--max-new-tokens", "30"]
    prompt = "</script><b>Step 1</b> & {{style}} \U0001f98a"
    assert main(["generate", base, *words, "--prompt", prompt, "--trace", str(path)]) == 0
    return path


def run(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    code = main(["lens", *words])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_generate_writes_a_trace_beside_the_same_answer(
    base: str, trace: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    words = ["generate", base, "--prompt", "Step 1", "--max-new-tokens", "12"]
    main(words)
    plain = capsys.readouterr().out
    assert main([*words, "--trace", str(tmp_path / "t.json")]) == 0
    assert capsys.readouterr().out == plain
    assert [path.name for path in tmp_path.iterdir()] == ["t.json"]
    found = read_trace(tmp_path / "t.json")
    assert (found.policy, found.options, found.model) == ("full", {}, base)
    model, tokenizer = load(base)
    generator = Generator(model, tokenizer)
    (answer,) = generator.generate("Step 1", 12)
    assert "".join(found.tokens) == generator.render("Step 1") + tokenizer.decode(answer.ids)


def test_a_place_that_is_none_is_told_before_anything_is_loaded(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    words = ["generate", "/no/such/model", "--prompt", "x", "--trace"]
    assert main([*words, str(tmp_path / "none" / "t.json")]) == 2
    assert "none is not there; make it" in capsys.readouterr().err
    assert main([*words, str(tmp_path)]) == 2
    assert "a folder; name a file in it" in capsys.readouterr().err
    there = tmp_path / "there.json"
    there.write_text("an answer", encoding="utf-8")
    assert main([*words, str(there)]) == 2
    told = capsys.readouterr().err
    assert told == f"zoomkv: --trace {there}: is there already; remove it, or name another file\n"
    assert there.read_text(encoding="utf-8") == "an answer"


def test_writes_a_page_beside_the_trace_or_where_it_is_told(
    trace: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    beside = trace.with_suffix(".html")
    assert run(capsys, str(trace)) == (0, f"{beside}\n", "")
    nowhere = tmp_path / "none" / "page.html"
    code, said, told = run(capsys, str(trace), "--out", str(nowhere))
    assert (code, said) == (2, "") and "none is not there; make it" in told
    other = tmp_path / "page.html"
    assert run(capsys, str(trace), "--out", str(other)) == (0, f"{other}\n", "")
    assert beside.read_bytes() == other.read_bytes()
    assert [path.name for path in tmp_path.iterdir()] == ["page.html"]


def test_a_page_holds_its_trace_and_nothing_breaks_out(
    trace: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    run(capsys, str(trace), "--out", str(tmp_path / "page.html"))
    text = (tmp_path / "page.html").read_text(encoding="utf-8")
    assert text.count("</script>") == text.count("<script") == 2
    assert "<b>Step" not in text and "http" not in text.replace("http-equiv", "").replace(
        "http://www.w3.org/2000/svg", ""
    )
    _, _, rest = text.partition('type="application/json">')
    data = json.loads(rest.partition("</script>")[0])
    told = json.loads(trace.read_text(encoding="utf-8"))
    assert data == {name: told[name] for name in data} and "{{style}}" in "".join(data["tokens"])


def test_a_large_page_says_so(
    trace: Path,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(page_module, "USUAL_BYTES", 1000)
    code, out, err = run(capsys, str(trace), "--out", str(tmp_path / "page.html"))
    assert code == 0 and out.startswith(str(tmp_path)) and "MB, a large page" in err


def changed(**parts: Any) -> Any:
    def change(told: dict[str, Any]) -> str:
        return json.dumps({**told, **parts})

    return change


BAD = [
    (lambda told: "", "torn, or no JSON"),
    (lambda told: json.dumps(told)[:-20], "torn, or no JSON"),
    (lambda told: "[]", "not a trace; make one with zoomkv generate --trace FILE"),
    (lambda told: '{"policy": "full"}', "not a trace; make one"),
    (changed(format=2), "a trace of format 2, and this version reads 1; trace the answer anew"),
    (changed(format=None), "a trace of format None"),
    (lambda told: json.dumps({n: told[n] for n in told if n != "tokens"}), "lacks tokens"),
    (changed(tokens=["a", 3]), "its tokens are no texts"),
    (changed(tokens=None), "its tokens are no texts"),
    (changed(prompt=0), "prompt is out of range"),
    (changed(prompt=10**6), "prompt is out of range"),
    (changed(layers="two"), "sizes are no counts"),
    (changed(groups=[[0, 1]]), "its groups are not its layers"),
    (changed(groups=[[0, 2], [1, 2]]), "its groups are not its layers"),
    (changed(groups=None), "not a whole trace"),
    (changed(levels=[]), "levels are missing"),
    (
        lambda told: json.dumps({**told, "levels": [16] * len(told["levels"])}),
        "levels are out of range",
    ),
    (changed(unread="<b>"), "unread is '<b>'"),
    (changed(device_bytes=[1]), "device_bytes is not of every step"),
    (changed(options=[]), "options are no table"),
    (changed(spans=[{"paragraph": [0, 1], "summary": [3, 2]}]), "a span is out of range"),
    (changed(spans=[{"paragraph": [0, 1]}]), "not a whole trace"),
    (changed(choices=[{"step": 1, "zoomed": [0], "summarised": []}]), "a choice names no span"),
    (changed(choices=[{"zoomed": [], "summarised": []}]), "not a whole trace"),
    (changed(spans=[{"paragraph": [], "summary": []}]), "a span has no two ends"),
    (changed(fetches=[[0, 0]]), "fetches are not of every step"),
    (
        lambda told: json.dumps({**told, "fetches": [5] * len(told["device_bytes"])}),
        "a fetch has no pair",
    ),
    (changed(states={}), "its states can't be decoded"),
    (changed(states={"counts": "", "gaps": "", "values": ""}), "its states can't be decoded"),
]


@pytest.mark.parametrize(("change", "message"), BAD, ids=[message for _, message in BAD])
def test_bad_input_is_one_line(
    trace: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path, change: Any, message: str
) -> None:
    told = json.loads(trace.read_text(encoding="utf-8"))
    bad = tmp_path / "bad.json"
    bad.write_text(change(told), encoding="utf-8")
    code, out, err = run(capsys, str(bad))
    assert (code, out) == (2, "")
    assert err.startswith(f"zoomkv: {bad}: ") and err.count("\n") == 1 and message in err
    assert [path.name for path in tmp_path.iterdir()] == ["bad.json"]


def test_other_bad_input(trace: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert "No such file" in run(capsys, str(tmp_path / "none.json"))[2]
    (tmp_path / "b.json").write_bytes(b"\xff\xfe")
    assert "not a trace (not UTF-8)" in run(capsys, str(tmp_path / "b.json"))[2]
    before = trace.read_bytes()
    code, _, err = run(capsys, str(trace), "--out", str(trace))
    assert code == 2 and "would take the place of the trace" in err
    assert trace.read_bytes() == before
    assert run(capsys)[0] == 2


@pytest.mark.parametrize("words", [["lens", "--help"], ["generate", "--help"]])
def test_help_is_light(words: list[str]) -> None:
    code = (
        "import sys; from zoomkv.cli import main\n"
        f"try: main({words!r})\nexcept SystemExit: pass\n"
        "print({'torch', 'transformers', 'lightning', 'numpy'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.endswith("set()\n")


def test_lens_needs_no_torch(trace: Path, tmp_path: Path) -> None:
    code = (
        "import sys; from zoomkv.cli import main\n"
        f"main(['lens', {str(trace)!r}, '--out', {str(tmp_path / 'p.html')!r}])\n"
        "print({'torch', 'transformers'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.endswith("set()\n")
