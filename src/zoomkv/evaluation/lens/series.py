"""A table of small numbers that changes a little from step to step, kept as what changes.

Each place of the table is told as a series of its own: in how many steps it changes, how many steps
lie between, and to what. Tokens that come and go together have the same series, and deflate finds
that: it takes a third of what the same changes take in the order of steps.
"""

from __future__ import annotations

import base64
import binascii
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

_PLANES = 4  # bytes of a number; those above the first are nearly all 0, and cost nothing
_COLUMN_BITS = 22


@dataclass(frozen=True)
class Series:
    """What changes in each place of a table, place by place, row by row.

    Attributes:
        counts: Changes of each place, int64 ``[rows * columns]``.
        steps: When each of them is, int64, increasing within a place.
        values: What stands there from that step on, uint8.
    """

    counts: np.ndarray
    steps: np.ndarray
    values: np.ndarray

    @classmethod
    def of_rows(cls, rows: Iterable[tuple[int, np.ndarray]]) -> Series:
        """From whole rows.

        Args:
            rows: For each what stands in it before the first step, and what in each step, uint8
                ``[columns, steps]``.
        """
        parts = []
        for initial, row in rows:
            before = np.concatenate([np.full_like(row[:, :1], initial), row[:, :-1]], axis=1)
            changes = row != before
            parts.append((changes.sum(1), changes.nonzero()[1], row[changes]))
        return cls(*(np.concatenate(part) for part in zip(*parts, strict=True)))

    def encoded(self) -> dict[str, str]:
        """Three texts: base64 of deflated bytes."""
        starts = self._starts()
        gaps = np.diff(self.steps, prepend=0)
        gaps[starts] = self.steps[starts]  # a place counts from the first step
        return {
            "counts": _packed(_planes(self.counts)),
            "gaps": _packed(_planes(gaps)),
            "values": _packed(self.values.astype(np.uint8).tobytes()),
        }

    @classmethod
    def decoded(cls, told: Any, places: int, steps: int) -> Series:
        """From what ``encoded`` gave.

        Args:
            told: The three texts.
            places: Of the table.
            steps: How many there are.

        Raises:
            ValueError: The texts are no such thing, or contradict each other.
        """
        try:
            parts = [_unpacked(told[name]) for name in ("counts", "gaps", "values")]
            counts, gaps = (_numbers(part) for part in parts[:2])
        except (KeyError, TypeError, ValueError, zlib.error, binascii.Error) as error:
            raise ValueError(f"its states can't be decoded ({error})") from None
        values = np.frombuffer(parts[2], np.uint8)
        if len(counts) != places or not len(gaps) == len(values) == counts.sum():
            raise ValueError("its states contradict each other")
        series = cls(counts, gaps, values)
        starts, total = series._starts(), gaps.cumsum()
        # Running sums that begin anew in each place.
        before = np.repeat(total[starts] - gaps[starts], counts[counts > 0])
        when = total - before
        if len(when) and int(when.max()) >= steps:
            raise ValueError("its states lie behind the last step")
        return cls(counts, when, values)

    def at(self, step: int, initial: np.ndarray) -> np.ndarray:
        """The table as it stands in a step, from what it was before the first one."""
        now = initial.copy()
        past = self.steps <= step
        place = np.repeat(np.arange(len(self.counts)), self.counts)
        # Of several changes of one place the last counts; numpy assigns in order.
        now.reshape(-1)[place[past]] = self.values[past]
        return now

    def _starts(self) -> np.ndarray:
        """Where the changes of each place that has any begin."""
        ends = self.counts.cumsum()
        return (ends - self.counts)[self.counts > 0]


class Log:
    """Takes a table step by step, and gives its rows.

    Args:
        initial: What stands in a new column, by row.
    """

    def __init__(self, initial: Sequence[int]) -> None:
        self.initial = np.array(initial, np.uint8)
        self.steps = 0
        self._last = np.empty((len(initial), 0), np.uint8)
        self._changes: list[tuple[np.ndarray, np.ndarray]] = []
        self._sorted: tuple[np.ndarray, np.ndarray, np.ndarray] | None = None

    @property
    def columns(self) -> int:
        """Columns so far."""
        return self._last.shape[1]

    def add(self, table: np.ndarray) -> None:  # uint8 [rows, columns so far]
        """The next step's table; columns are only ever added."""
        new = table.shape[1] - self._last.shape[1]
        last = np.concatenate([self._last, np.repeat(self.initial[:, None], new, 1)], 1)
        rows, columns = (table != last).nonzero()
        place = (rows << _COLUMN_BITS | columns).astype(np.uint32)  # millions may have to be kept
        self._changes.append((place, table[rows, columns]))
        self._last, self._sorted = table, None
        self.steps += 1

    def row(self, number: int, columns: int) -> np.ndarray:  # uint8 [columns, steps]
        """What stood in a row's first columns in each step."""
        place, step, value = self._by_place()
        first, last = np.searchsorted(place, [number << _COLUMN_BITS, number + 1 << _COLUMN_BITS])
        column = place[first:last] & ((1 << _COLUMN_BITS) - 1)
        dense = np.zeros((columns, self.steps + 1), np.uint8)
        dense[:, 0] = self.initial[number]
        dense[column, step[first:last] + 1] = value[first:last]
        # Each step takes what the last change before it has left.
        source = np.zeros(dense.shape, np.int32)
        source[column, step[first:last] + 1] = step[first:last] + 1
        np.maximum.accumulate(source, axis=1, out=source)
        return np.take_along_axis(dense, source, axis=1)[:, 1:]

    def _by_place(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        if self._sorted is None:
            counts = [len(place) for place, _ in self._changes]
            place, value = (np.concatenate(part) for part in zip(*self._changes, strict=True))
            step = np.repeat(np.arange(self.steps, dtype=np.int32), counts)
            order = place.argsort(kind="stable")
            self._sorted = (place[order].astype(np.int64), step[order], value[order])
        return self._sorted


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
