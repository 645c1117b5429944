"""One page with all of a report in it: it needs no server, no network and no other file."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from importlib.resources import files
from typing import Any

from zoomkv.evaluation.results import budget_text

_SCRIPTS = ("base.js", "charts.js", "save.js", "figures.js", "table.js", "page.js")


def page(numbers: Mapping[str, Any]) -> str:
    """The HTML of a report.

    Args:
        numbers: From ``report_numbers``; all of them, and nothing else, are shown.
    """
    rows = [
        {**row, "budget_text": budget_text(row["budget"], row["tuned"]) or "—"}
        for row in numbers["rows"]
    ]
    # As columns: the names of hundreds of rows would be half of the page.
    columns = {name: [row[name] for row in rows] for name in rows[0]}
    parts = {
        "style": _read("page.css"),
        "data": _embedded({**numbers, "rows": columns}),
        "script": "\n".join(map(_read, _SCRIPTS)),
    }
    # At once: a text of the data may look like a place for another part.
    return re.sub(r"/\*(style|data|script)\*/", lambda found: parts[found[1]], _read("page.html"))


def _embedded(value: Any) -> str:
    """JSON that can't end the script element it stands in, whatever texts hold."""
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    return text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")


def _read(name: str) -> str:
    return files("zoomkv.evaluation.report").joinpath(name).read_text(encoding="utf-8")
