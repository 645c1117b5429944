"""``zoomkv export RUN_OR_CKPT TARGET``"""

from __future__ import annotations

from collections.abc import Sequence

from zoomkv.cli.parser import Parser


def main(argv: Sequence[str]) -> None:
    """Exports a training checkpoint."""
    parser = Parser("export", "Turns a training checkpoint into a small artifact.")
    parser.add_argument("source", metavar="RUN_OR_CKPT", help="a run's folder, or a .ckpt file")
    parser.add_argument("target", metavar="TARGET", help="the folder to write, replaced if there")
    arguments = parser.parse_args(argv[1:])
    from zoomkv.export.from_checkpoint import export_checkpoint

    export_checkpoint(arguments.source, arguments.target)
    print(arguments.target)
