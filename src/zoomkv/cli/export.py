"""``zoomkv export RUN_OR_CKPT TARGET``"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from zoomkv.cli.parser import Parser, option


def main(argv: Sequence[str]) -> None:
    """Exports a training checkpoint."""
    arguments = _parser().parse_args(argv[1:])
    options = dict(map(option, arguments.option))
    figures = _figures(arguments.figures) if arguments.figures else None
    from zoomkv.export.from_checkpoint import export_checkpoint

    export_checkpoint(arguments.source, arguments.target, options, figures, arguments.note)
    print(arguments.target)


def _parser() -> Parser:
    parser = Parser("export", "Turns a training checkpoint into a small artifact.")
    parser.add_argument("source", metavar="RUN_OR_CKPT", help="a run's folder, or a .ckpt file")
    parser.add_argument("target", metavar="TARGET", help="the folder to write, replaced if there")
    parser.add_argument(
        "-o",
        "--option",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="an option that the policy should have by default, such as window=64",
    )
    parser.add_argument("--figures", metavar="FILE", help="JSON object of figures for the card")
    parser.add_argument("--note", help="how it was trained, for the card")
    return parser


def _figures(path: str) -> dict[str, Any]:
    try:
        figures = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"--figures {path}: can't be read as JSON ({error})") from error
    if not isinstance(figures, dict):
        raise ValueError(f"--figures {path}: not a JSON object")
    return figures
