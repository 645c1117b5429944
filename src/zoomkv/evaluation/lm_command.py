"""lm-eval's own command, in which ``--model zoomkv`` is our class."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.util import find_spec

MODEL = "zoomkv"
CLASS = "zoomkv.evaluation.lm_harness:ZoomKVLM"


def run(words: Sequence[str]) -> None:
    """Hands ``words`` over to lm-eval; it prints, exits and writes as ever.

    Raises:
        ValueError: lm-eval is not installed.
    """
    if find_spec("lm_eval") is None:
        raise ValueError("lm-eval is not installed; run: pip install 'zoomkv[eval]'")
    from lm_eval.__main__ import cli_evaluate
    from lm_eval.api.registry import model_registry

    if MODEL not in model_registry:
        model_registry.register(MODEL, target=CLASS)  # imported when lm-eval asks for it
    outer = sys.argv
    sys.argv = ["lm-eval", *words]
    try:
        cli_evaluate()
    finally:
        sys.argv = outer
