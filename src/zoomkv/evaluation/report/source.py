"""Results files, read for a report."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

_FORMAT = 1


@dataclass
class Source:
    """One results file and its timings."""

    path: Path
    header: dict[str, Any]
    checks: list[dict[str, Any]] = field(default_factory=list)
    answers: list[dict[str, Any]] = field(default_factory=list)
    timings: list[dict[str, Any]] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)


def read_source(path: Path) -> Source:
    """A results file with the timings beside it, if there are any.

    Raises:
        ValueError: It is no results file, or of another format.
    """
    warnings: list[str] = []
    lines = _lines(path, warnings)
    if not lines or lines[0].get("kind") != "header":
        raise ValueError(f"{path}: no results of zoomkv evaluate: its first line is no header")
    header = lines[0]
    if header.get("format") != _FORMAT:
        raise ValueError(f"{path}: format {header.get('format')}, and this version reads {_FORMAT}")
    source = Source(path, header, warnings=warnings)
    source.checks = [line for line in lines if line["kind"] == "check"]
    source.answers = [line for line in lines if line["kind"] == "answer"]
    timing = path.with_name(f"{path.stem}.timing.jsonl")
    if timing.exists():
        source.timings = [line for line in _lines(timing, warnings) if line["kind"] == "timing"]
    return source


def _lines(path: Path, warnings: list[str]) -> list[dict[str, Any]]:
    pieces = path.read_bytes().split(b"\n")
    found = []
    for number, piece in enumerate(pieces, 1):
        torn = number == len(pieces)
        if torn and piece:
            warnings.append(f"{path}:{number}: the last line is torn and was left out")
        if torn or not piece.strip():
            continue
        try:
            found.append(json.loads(piece))
        except ValueError as error:
            raise ValueError(f"{path}:{number}: no JSON ({error})") from None
    return found
