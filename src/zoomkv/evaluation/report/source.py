"""Results files of a report, each with its timings and what was wrong with it."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from zoomkv.evaluation.results import Results, read, read_timings


@dataclass(frozen=True)
class Source:
    """One results file."""

    path: Path
    results: Results
    timings: list[dict[str, Any]]
    """As far as there are any."""
    warnings: list[str]
    """Such as that its last line is torn."""


def read_source(path: Path) -> Source:
    """A results file and its timings.

    Raises:
        ValueError: It is no results file, or of another format.
    """
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        results, timings = read(path), read_timings(path)
    return Source(path, results, timings, [str(each.message) for each in caught])
