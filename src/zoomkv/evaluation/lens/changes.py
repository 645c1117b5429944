"""A table that changes a little from step to step, kept as its changes.

A trace's table has a row of marks and a row for each group of layers, a column for each token, and
one byte in each place. What changes is told in the order of steps, rows and columns, so most of it
is the same small numbers again and again, and deflates to little.
"""

from __future__ import annotations

import base64
import binascii
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

_PLANES = 4  # bytes of a number; those above the first are nearly all 0, and cost nothing


@dataclass(frozen=True)
class Changes:
    """What differs from the step before, for every step.

    Attributes:
        counts: Changes of each step, int64 ``[steps]``.
        places: ``row * columns + column`` of each change, int64, increasing within a step.
        values: What stands there from that step on, uint8.
    """

    counts: np.ndarray
    places: np.ndarray
    values: np.ndarray

    def encoded(self) -> dict[str, str]:
        """Three texts: base64 of deflated bytes."""
        starts = self._starts()
        gaps = np.diff(self.places, prepend=-1) - 1
        gaps[starts] = self.places[starts]  # a step counts from the first place
        return {
            "counts": _packed(_planes(self.counts)),
            "gaps": _packed(_planes(gaps)),
            "values": _packed(self.values.astype(np.uint8).tobytes()),
        }

    @classmethod
    def decoded(cls, told: Any, size: int) -> Changes:
        """From what ``encoded`` gave.

        Args:
            told: The three texts.
            size: Places of the table.

        Raises:
            ValueError: The texts are no such thing, or contradict each other.
        """
        try:
            parts = [_unpacked(told[name]) for name in ("counts", "gaps", "values")]
            counts, gaps = (_numbers(part) for part in parts[:2])
        except (KeyError, TypeError, ValueError, zlib.error, binascii.Error) as error:
            raise ValueError(f"its changes can't be decoded ({error})") from None
        values = np.frombuffer(parts[2], np.uint8)
        if not len(gaps) == len(values) == counts.sum():
            raise ValueError("its changes contradict each other")
        changes = cls(counts, gaps, values)
        starts = changes._starts()
        # Running sums that begin anew at each step.
        total = (gaps + 1).cumsum()
        before = np.zeros_like(total)
        before[starts] = np.diff(total[starts] - gaps[starts] - 1, prepend=0)
        places = total - before.cumsum() - 1
        if len(places) and int(places.max()) >= size:
            raise ValueError("its changes lie outside the table")
        return cls(counts, places, values)

    def after(self, step: int, table: np.ndarray) -> np.ndarray:
        """The table as it stands in a step, from what it was before the first one."""
        now = table.copy()
        until = int(self.counts[: step + 1].sum())
        # Of several changes of one place the last counts; numpy assigns in order.
        now.reshape(-1)[self.places[:until]] = self.values[:until]
        return now

    def _starts(self) -> np.ndarray:
        """Where the changes of each step that has any begin."""
        ends = self.counts.cumsum()
        return (ends - self.counts)[self.counts > 0]


class ChangeLog:
    """Takes a table step by step and keeps the changes.

    Args:
        initial: What stands in a new column, by row.
    """

    def __init__(self, initial: Sequence[int]) -> None:
        self._initial = np.array(initial, np.uint8)
        self._last = np.empty((len(initial), 0), np.uint8)
        self._steps: list[tuple[np.ndarray, np.ndarray, np.ndarray]] = []

    def add(self, table: np.ndarray) -> None:  # uint8 [rows, columns so far]
        """The next step's table; columns are only ever added."""
        new = table.shape[1] - self._last.shape[1]
        last = np.concatenate([self._last, np.repeat(self._initial[:, None], new, 1)], 1)
        rows, columns = (table != last).nonzero()
        self._steps.append((rows.astype(np.int32), columns.astype(np.int32), table[rows, columns]))
        self._last = table

    def changes(self, columns: int) -> Changes:
        """All of it, for a table of so many columns in the end."""
        counts = np.array([len(values) for _, _, values in self._steps], np.int64)
        parts = [np.concatenate([[], *part]) for part in zip(*self._steps, strict=True)]
        rows, column, values = parts or [np.zeros(0)] * 3
        places = rows.astype(np.int64) * columns + column.astype(np.int64)
        return Changes(counts, places, values.astype(np.uint8))


def _planes(numbers: np.ndarray) -> bytes:
    """All lowest bytes, then all second ones, and so on."""
    little = numbers.astype("<u4").view(np.uint8).reshape(-1, _PLANES)
    return little.T.tobytes()


def _numbers(planes: bytes) -> np.ndarray:
    if len(planes) % _PLANES:
        raise ValueError("half a number")
    rows = np.frombuffer(planes, np.uint8).reshape(_PLANES, -1)
    return np.ascontiguousarray(rows.T).view("<u4").reshape(-1).astype(np.int64)


def _packed(raw: bytes) -> str:
    return base64.b64encode(zlib.compress(raw, 9)).decode("ascii")


def _unpacked(text: str) -> bytes:
    return zlib.decompress(base64.b64decode(text, validate=True))
