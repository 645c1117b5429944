"""Intervals and tests for shares of right answers."""

from __future__ import annotations

import math
from collections.abc import Sequence

_Z = 1.959964  # two-sided 95 %


def wilson(successes: int, n: int) -> tuple[float, float]:
    """The 95 % Wilson score interval of a share.

    Args:
        successes: Out of ``n``.
        n: At least 1.
    """
    share, z2 = successes / n, _Z**2
    middle = (share + z2 / (2 * n)) / (1 + z2 / n)
    half = _Z / (1 + z2 / n) * math.sqrt(share * (1 - share) / n + z2 / (4 * n * n))
    return max(0.0, middle - half), min(1.0, middle + half)


def mcnemar(first: Sequence[bool], second: Sequence[bool]) -> float:
    """The exact two-sided p of McNemar's test for paired answers.

    Args:
        first: Marks of one method on each problem.
        second: Marks of another on the same problems.
    """
    better = sum(a and not b for a, b in zip(first, second, strict=True))
    worse = sum(b and not a for a, b in zip(first, second, strict=True))
    n = better + worse
    tail = sum(math.comb(n, k) for k in range(min(better, worse) + 1)) / 2**n
    return min(1.0, 2 * tail)
