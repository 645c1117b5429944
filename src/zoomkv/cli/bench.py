"""``zoomkv bench NAME ...`` runs ``benchmarks/NAME.py`` of a checkout."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import zoomkv
from zoomkv.cli.parser import Parser


def main(argv: Sequence[str]) -> int:
    """The exit code of the benchmark, which gets all further options."""
    folder = Path(zoomkv.__file__).parents[2] / "benchmarks"
    scripts = {script.stem: script for script in sorted(folder.glob("[a-z]*.py"))}
    names = ", ".join(scripts)
    parser = Parser("bench", "Measures speed and memory; each benchmark has its own --help.")
    parser.add_argument("name", metavar="NAME", help=names or "needs a checkout of the repository")
    name = parser.parse_args(argv[1:2]).name
    if not names:
        raise ValueError(f"no benchmarks in {folder}: bench needs a checkout of the repository")
    if name not in scripts:
        raise ValueError(f"no benchmark {name!r}: choose from {names}")
    return subprocess.call([sys.executable, str(scripts[name]), *argv[2:]])
