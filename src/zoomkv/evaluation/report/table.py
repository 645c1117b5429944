"""The rows of a report as Markdown, to read, and as CSV, to go on with."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from zoomkv.evaluation.results import budget_text

Row = Mapping[str, Any]

_COLUMNS: dict[str, Callable[[Row], str]] = {
    "task": lambda row: row["task"],
    "policy": lambda row: row["label"],
    "budget": lambda row: budget_text(row["budget"], row["tuned"]) or "—",
    "question": lambda row: row["protocol"] or "—",
    "length": lambda row: _number(row["length"], ",d"),
    "n": lambda row: f"{row['n']:,d}",
    "right, % (95 %)": lambda row: _interval(row, "right", 100, ".1f"),
    "score": lambda row: _number(row["score"], ".3f"),
    "peak, % of full": lambda row: _number(row["held"], ".1f", 100),
    "device, MiB": lambda row: _number(row["device_bytes_mean"], ",.2f", 2**-20),
    "host, MiB": lambda row: _number(row["host_bytes"], ",.2f", 2**-20),
    "to device, MiB": lambda row: _number(row["bytes_to_device"], ",.1f", 2**-20),
    "tokens/s (95 %)": lambda row: _interval(row, "tokens_per_second", 1, ".1f"),
    "agreeability": lambda row: _number(row["agreeability"], ".3f"),
    "KL, nats": lambda row: _number(row["kl"], ".4f"),
}
_TEXTS = ("task", "policy", "budget", "question")


def markdown(rows: Sequence[Row]) -> str:
    """A Markdown table; columns in which no row has a value are left out."""
    columns = {name: [text(row) for row in rows] for name, text in _COLUMNS.items()}
    columns = {name: cells for name, cells in columns.items() if set(cells) != {"—"}}
    rule = ("---" if name in _TEXTS else "---:" for name in columns)
    lines = [columns.keys(), rule, *zip(*columns.values(), strict=True)]
    return "".join("| " + " | ".join(map(_cell, line)) + " |\n" for line in lines)


def csv_text(rows: Sequence[Row]) -> str:
    """All numbers of all rows, unscaled, with seven digits: shares from 0 to 1, bytes.

    A budget with a point is a share of the full cache, one without is rows.
    """
    file = io.StringIO()
    writer = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
    writer.writeheader()
    for row in rows:
        options = json.dumps(row["options"], ensure_ascii=False, sort_keys=True)
        writer.writerow({**row, "options": options})
    return file.getvalue()


def _number(value: float | None, form: str, scale: float = 1) -> str:
    return "—" if value is None else format(value if scale == 1 else value * scale, form)


def _interval(row: Row, name: str, scale: float, form: str) -> str:
    if row[name] is None:
        return "—"
    low, high = (format(row[f"{name}_{end}"] * scale, form) for end in ("low", "high"))
    return f"{row[name] * scale:{form}} ({low}–{high})"


def _cell(text: str) -> str:
    for mark in ("\\", "|", "<", ">", "`", "*", "_", "[", "]"):
        text = text.replace(mark, "\\" + mark)
    return " ".join(text.split())
