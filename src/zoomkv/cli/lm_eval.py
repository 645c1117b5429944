"""``zoomkv lm-eval ...``: lm-eval's own command, in which ``--model zoomkv`` is our class."""

from __future__ import annotations

from collections.abc import Sequence

from zoomkv.evaluation.lm_command import run


def main(argv: Sequence[str]) -> None:
    """Hands the words behind ``lm-eval`` over to lm-eval."""
    run(argv[1:])
