"""One page, whole in itself, that shows a trace."""

from __future__ import annotations

import html
import json
import re
from dataclasses import asdict
from importlib.resources import files

from zoomkv.evaluation.lens.trace_file import Trace

USUAL_BYTES = 2_000_000
"""A page that exceeds this is slow to send around."""


def page_of(trace: Trace) -> str:
    """HTML that needs nothing else: no network, no library.

    Args:
        trace: As it was read or recorded.
    """
    data = json.dumps(asdict(trace), ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    parts = {
        "title": html.escape(f"Cache lens: {trace.policy}"),
        "style": _part("page.css"),
        # Within a script only "<" can end it; JSON has another way to write it.
        "trace": data.replace("<", "\\u003c"),
        "script": _part("page.js"),
    }
    # In one pass: a text that looks like a place for another stays as it is.
    return re.sub(r"\{\{(\w+)\}\}", lambda found: parts[found[1]], _part("page.html"))


def _part(name: str) -> str:
    return files("zoomkv.evaluation.lens").joinpath(name).read_text(encoding="utf-8")
