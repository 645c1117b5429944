"""Every block of README and guides is true: Python runs, commands parse, targets exist."""

from __future__ import annotations

import re
import shlex
import subprocess
from importlib import import_module
from pathlib import Path

import pytest

from zoomkv.cli.dispatch import COMMANDS

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
_BLOCK = re.compile(r"^```(\w+)\n(.*?)^```", re.DOTALL | re.MULTILINE)


def blocks(language: str) -> list[tuple[str, str]]:
    return [
        (f"{page.name}:{page.read_text()[: found.start()].count(chr(10)) + 1}", found[2])
        for page in PAGES
        for found in _BLOCK.finditer(page.read_text(encoding="utf-8"))
        if found[1] == language
    ]


def commands() -> list[tuple[str, list[str]]]:
    lines = [
        (where, line)
        for where, block in blocks("bash")
        for line in block.replace("\\\n", " ").splitlines()
    ]
    words = [(where, shlex.split(line, comments=True)) for where, line in lines]
    return [(where, of_line) for where, of_line in words if of_line]


@pytest.mark.parametrize(
    "code", [code for where, code in blocks("python") if where.startswith("README")]
)
def test_python_of_the_readme_runs(code: str, monkeypatch, capsys) -> None:
    monkeypatch.chdir(ROOT)
    exec(compile(code, "README.md", "exec"), {})  # noqa: S102
    assert capsys.readouterr().out.strip()


@pytest.mark.parametrize(("where", "words"), commands(), ids=lambda value: str(value)[:60])
def test_commands_exist_and_parse(where: str, words: list[str]) -> None:
    program, *rest = words
    if program == "make":
        subprocess.run(["make", "-n", *rest], cwd=ROOT, check=True, capture_output=True)
    elif program == "python":
        assert (ROOT / rest[0]).is_file(), where
    elif program == "zoomkv":
        assert rest[0] in COMMANDS, where
        configs = [word for word in rest if word.endswith(".yaml")]
        assert all((ROOT / config).is_file() for config in configs), where
        parser = getattr(import_module(COMMANDS[rest[0]][0]), "_parser", None)
        if parser is not None:
            parser().parse_args(rest[1:])
    else:
        assert program in ("pip", "git"), f"{where}: a command that no test knows: {program}"


def test_there_is_something_to_test() -> None:
    assert len(blocks("python")) >= 2 and len(commands()) >= 8


def test_links_lead_somewhere() -> None:
    for page in PAGES:
        for target in re.findall(r"\]\(([^)#:]+)\)", page.read_text(encoding="utf-8")):
            assert (page.parent / target).exists(), f"{page.name}: {target}"
