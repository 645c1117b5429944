"""The command line: quick help, lazy commands, and one line for whatever goes wrong."""

import json
import subprocess
import sys
from argparse import ArgumentError
from importlib.util import find_spec
from types import SimpleNamespace

import pytest

import zoomkv
from zoomkv.cli import bench, main
from zoomkv.cli.dispatch import COMMANDS


@pytest.fixture
def run_fake(monkeypatch):
    """Runs ``zoomkv fit ...`` with ``fit`` played by a function."""

    def run(command, *words):
        fake = SimpleNamespace(main=command)
        monkeypatch.setattr("zoomkv.cli.dispatch.import_module", lambda name: fake)
        return main(["fit", *words])

    return run


def fails_with(error):
    def command(argv):
        raise error

    return command


@pytest.mark.parametrize("words", [["--help"], ["-h"], ["--version"], ["nothing"]])
def test_without_a_command_nothing_heavy_is_imported(words):
    code = (
        "import sys; from zoomkv.cli import main; main(sys.argv[1:]);"
        "print(*{name.partition('.')[0] for name in sys.modules}, file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code, *words], capture_output=True, text=True)
    loaded = done.stderr.splitlines()[-1].split()
    heavy = {"torch", "transformers", "lightning", "numpy", "datasets", "rich", "jsonargparse"}
    assert "zoomkv" in loaded and not heavy & set(loaded)


def test_help_names_every_command(capsys):
    assert main(["--help"]) == 0
    out = capsys.readouterr().out
    assert all(f"\n  {name} " in out for name in COMMANDS)


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_is_there(name):
    module, _ = COMMANDS[name]
    assert find_spec(module) is not None


@pytest.mark.parametrize("name", ["summarize", "export", "generate", "bench"])
def test_help_of_a_command_is_light(name):
    code = (
        "import sys; from zoomkv.cli import main\n"
        "try: main([sys.argv[1], '--help'])\n"
        "except SystemExit as done: assert done.code == 0\n"
        "assert 'torch' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", code, name], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(f"usage: zoomkv {name}")


def test_module_and_console_script_are_the_same():
    command = [sys.executable, "-m", "zoomkv", "--version"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.stdout == f"zoomkv {zoomkv.__version__}\n"


def test_no_command_shows_the_usage(capsys):
    assert main([]) == 2
    assert capsys.readouterr().err.startswith("usage: zoomkv COMMAND")


@pytest.mark.parametrize(
    ("word", "hint"),
    [("gnerate", "did you mean 'generate'?"), ("qqq", "see zoomkv --help"), ("", "see zoomkv")],
)
def test_an_unknown_command_gets_a_hint(capsys, word, hint):
    assert main([word]) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith(f"zoomkv: no command {word!r}: {hint}")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["summarize"], "the following arguments are required: IN, OUT, --model"),
        (["summarize", "a", "b", "--model"], "argument --model: expected one argument"),
        (["summarize", "a", "b", "--modle", "m"], "required: --model"),
        (["summarize", "a", "b", "--model", "m", "--parallel", "0"], "argument --parallel: '0' is"),
        (["export", "a"], "the following arguments are required: TARGET"),
    ],
)
def test_wrong_usage_is_one_line(capsys, words, message):
    assert main(words) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert message in line and line.endswith(f"(see zoomkv {words[0]} --help)")


@pytest.mark.parametrize(
    ("error", "code", "line"),
    [
        (ValueError("in.jsonl:3: no\n\n  problem"), 2, "zoomkv: in.jsonl:3: no problem"),
        (json.JSONDecodeError("bad", "x", 0), 2, "zoomkv: bad: line 1 column 1 (char 0)"),
        (OSError(28, "No space left", "out"), 2, "zoomkv: [Errno 28] No space left: 'out'"),
        (ArgumentError(None, "no such option"), 2, "zoomkv: no such option"),
        (RuntimeError("boom"), 1, "zoomkv: RuntimeError: boom (--debug shows where)"),
        (KeyError("x"), 1, "zoomkv: KeyError: 'x' (--debug shows where)"),
        (KeyboardInterrupt(), 130, "zoomkv: interrupted"),
    ],
)
def test_an_error_is_one_line(run_fake, capsys, monkeypatch, error, code, line):
    monkeypatch.delenv("ZOOMKV_DEBUG", raising=False)
    assert run_fake(fails_with(error)) == code
    assert capsys.readouterr().err == line + "\n"


@pytest.mark.parametrize("error", [ValueError, RuntimeError])
def test_debug_adds_the_traceback(run_fake, capsys, monkeypatch, error):
    monkeypatch.delenv("ZOOMKV_DEBUG", raising=False)
    run_fake(fails_with(error("no")), "--debug")
    by_option = capsys.readouterr().err
    monkeypatch.setenv("ZOOMKV_DEBUG", "1")
    run_fake(fails_with(error("no")))
    for lines in (by_option.splitlines(), capsys.readouterr().err.splitlines()):
        assert lines[0].startswith("Traceback") and lines[-1].startswith("zoomkv: ")
        assert any(line.endswith("in command") for line in lines)


def test_the_command_gets_its_words_and_gives_the_exit_code(run_fake):
    seen = []
    assert run_fake(seen.extend, "--config", "x.yaml", "--debug") == 0
    assert seen == ["fit", "--config", "x.yaml"]
    assert run_fake(lambda argv: 7) == 7


def test_a_closed_pipe_is_silent():
    code = (
        "import sys, types, zoomkv.cli.dispatch as d\n"
        "def command(argv):\n"
        "    while True: print('line')\n"
        "d.import_module = lambda name: types.SimpleNamespace(main=command)\n"
        "sys.exit(d.main(['fit']))"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    process.stdout.readline()
    process.stdout.close()
    assert process.wait(20) == 1
    with process.stderr:
        assert process.stderr.read() == ""


def test_bench_runs_the_script_of_a_checkout(tmp_path, monkeypatch, capsys):
    package = tmp_path / "src" / "zoomkv" / "__init__.py"
    monkeypatch.setattr(bench.zoomkv, "__file__", str(package))
    assert main(["bench", "decode"]) == 2
    assert "bench needs a checkout" in capsys.readouterr().err
    (tmp_path / "benchmarks").mkdir()
    (tmp_path / "benchmarks" / "decode.py").write_text("import sys; sys.exit(len(sys.argv))")
    assert main(["bench", "decode", "--tokens", "3"]) == 3
    assert main(["bench", "memory"]) == 2
    assert "no benchmark 'memory': choose from decode" in capsys.readouterr().err


def test_values_may_be_written_as_in_the_policy_files():
    from zoomkv.cli.parser import option

    assert option("recent=null") == ("recent", None)
    assert option("count-prefix=true") == ("count_prefix", True)
    assert option("budget=0.5") == ("budget", 0.5)


def test_stdin_may_be_named_last():
    from zoomkv.cli.generate import _parser

    parsed = _parser().parse_intermixed_args(["m", "--policy", "h2o", "-o", "recent=4", "-"])
    assert (parsed.model, parsed.stdin, parsed.policy) == ("m", "-", "h2o")
