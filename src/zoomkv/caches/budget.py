"""How many rows a cache may hold: a number, or a share of the full cache."""

from dataclasses import dataclass

import torch
from torch import Tensor

LARGEST = 2**31 - 1
"""Rows: positions are 32-bit numbers."""
_SHARE_STEP = 32  # a share grows with the sequence; buffers follow in steps of this many rows


@dataclass(frozen=True)
class Budget:
    """A bound on the device bytes of a cache, in row equivalents.

    One row is what one KV head of one layer stores of one token of one batch row.
    """

    value: int | float

    @classmethod
    def parse(cls, value: int | float, smallest: int = 1, why: str = "") -> "Budget":
        """Checks a budget as users give it.

        Args:
            value: Rows (an int), or a share of full KV in (0, 1] (a float).
            smallest: Rows that the policy needs at least; a share that comes to less is raised.
            why: The rule that says so.

        Raises:
            ValueError: If it is out of range.
        """
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ValueError(f"budget={value!r}: give a number of rows or a share in (0, 1]")
        if isinstance(value, float) and not 0 < value <= 1:
            raise ValueError(
                f"budget={value}: a share of full KV lies in (0, 1]; give rows as a whole number"
            )
        if isinstance(value, int) and value > LARGEST:
            raise ValueError(f"budget={value}: no cache holds more than {LARGEST} rows")
        if isinstance(value, int) and value < smallest:
            why = why and f": {why}"
            raise ValueError(f"budget={value}: this policy needs at least {smallest} rows{why}")
        return cls(value)

    def rows(self, full: Tensor, step: int = _SHARE_STEP) -> Tensor:  # [B] -> [B]
        """Rows allowed to each batch row, where its full cache holds ``full``.

        A share comes to a multiple of ``step`` rows, once it is above two of them.
        """
        if isinstance(self.value, int):
            return torch.full_like(full, self.value)
        if self.value == 1:
            return torch.full_like(full, LARGEST)  # all of it, whatever indexes it
        rows = (self.value * full.double()).long()
        return torch.where(rows < 2 * step, rows, rows // step * step)


def check_at_least(option: str, value: int, smallest: int) -> int:
    """Returns the value of an integer option.

    Raises:
        ValueError: If it is not an integer or below ``smallest``.
    """
    if isinstance(value, bool) or not isinstance(value, int) or value < smallest:
        raise ValueError(f"{option}={value!r}: give a whole number of at least {smallest}")
    if value > LARGEST:
        raise ValueError(f"{option}={value}: give at most {LARGEST}")
    return value


def check_flag(option: str, value: bool) -> bool:
    """Returns the value of an option that is on or off.

    Raises:
        ValueError: If it is neither; a word that says ``no`` must not turn it on.
    """
    if not isinstance(value, bool):
        raise ValueError(f"{option}={value!r}: give true or false")
    return value
