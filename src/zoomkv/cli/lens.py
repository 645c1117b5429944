"""``zoomkv lens TRACE [--out PAGE]``: what a cache held of each token, step by step."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from zoomkv.cli.parser import Parser


def main(argv: Sequence[str]) -> None:
    """Writes the page; its place goes to stdout."""
    arguments = _parser().parse_args(argv[1:])
    source = Path(arguments.trace)
    out = Path(arguments.out or source.with_suffix(".html"))
    if out.resolve() == source.resolve():
        raise ValueError(
            f"{source}: the page would take the place of the trace; choose another --out"
        )
    if not out.parent.is_dir():
        raise ValueError(f"--out {out}: the folder {out.parent} is not there; make it")
    from zoomkv.evaluation.lens.page import USUAL_BYTES, page_of
    from zoomkv.evaluation.lens.trace_file import read_trace, write_whole

    page = page_of(read_trace(source))
    write_whole(out, page)
    size = len(page.encode())
    if size > USUAL_BYTES:
        print(f"{out}: {size / 1e6:.1f} MB, a large page: a long answer makes one", file=sys.stderr)
    print(out)


def _parser() -> Parser:
    parser = Parser(
        "lens",
        "Turns a trace of zoomkv generate --trace into a page that shows, step by step, how the "
        "cache held each token.",
    )
    parser.add_argument("trace", metavar="TRACE", help="what zoomkv generate --trace wrote")
    parser.add_argument("--out", metavar="PAGE", help="the page (NAME.html for NAME.json)")
    return parser
