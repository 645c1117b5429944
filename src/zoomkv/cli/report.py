"""``zoomkv report RESULTS... --out DIR``: results as tables, figures and a page."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from zoomkv.cli.parser import Parser


def main(argv: Sequence[str]) -> None:
    """Runs ``zoomkv report``.

    Args:
        argv: ``report`` and what follows.

    Raises:
        ValueError: Wrong usage, no results, or results that can't be in one report.
        OSError: A file can't be read or written.
    """
    arguments = _parser().parse_args(argv[1:])

    from zoomkv.evaluation.report.numbers import report_numbers
    from zoomkv.evaluation.report.page import page
    from zoomkv.evaluation.report.source import read_source
    from zoomkv.evaluation.report.table import csv_text, markdown
    from zoomkv.evaluation.results import timing_path

    paths = [Path(path) for path in arguments.results]
    beside = set(map(timing_path, paths))  # a pattern such as runs/*.jsonl names them too
    sources = [read_source(path) for path in paths if path not in beside]
    numbers = report_numbers(sources, shlex.join(["zoomkv", *argv]))
    for warning in numbers["warnings"]:
        print(warning, file=sys.stderr)
    out = Path(arguments.out)
    out.mkdir(parents=True, exist_ok=True)
    texts = {
        "report.json": json.dumps(numbers, ensure_ascii=False, indent=1, allow_nan=False) + "\n",
        "table.md": markdown(numbers["rows"]),
        "table.csv": csv_text(numbers["rows"]),
        "index.html": page(numbers),
    }
    for name, text in texts.items():
        _write(out / name, text)
    answers = sum(row["n"] for row in numbers["rows"])
    print(f"{out}: {', '.join(texts)} ({answers:,} answers in {len(numbers['rows']):,} rows)")


def _parser() -> Parser:
    parser = Parser("report", "Turns results of zoomkv evaluate into tables, figures and a page.")
    parser.add_argument(
        "results", metavar="RESULTS", nargs="+", help="results files of one model (.jsonl)"
    )
    parser.add_argument(
        "--out",
        metavar="DIR",
        required=True,
        help="folder for index.html, table.md, table.csv and report.json; older ones are replaced",
    )
    return parser


def _write(path: Path, text: str) -> None:
    """Lets a file appear whole or not at all."""
    partial = path.with_name(path.name + ".partial")
    try:
        partial.write_text(text, encoding="utf-8", newline="")
        partial.replace(path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise
