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
    names = ", ".join(script.stem for script in sorted(folder.glob("[a-z]*.py")))
    parser = Parser("bench", "Measures speed and memory; each benchmark has its own --help.")
    parser.add_argument("name", metavar="NAME", help=names or "needs a checkout of the repository")
    script = folder / f"{parser.parse_args(argv[1:2]).name}.py"
    if not names:
        raise ValueError(f"no benchmarks in {folder}: bench needs a checkout of the repository")
    if not script.is_file():
        raise ValueError(f"no benchmark {script.stem!r}: choose from {names}")
    return subprocess.call([sys.executable, str(script), *argv[2:]])
