"""Means and ratios with their 95 % intervals, from the normal distribution."""

from __future__ import annotations

import math
from collections.abc import Sequence

_Z = 1.959964


def standard_deviation(values: Sequence[float]) -> float | None:
    """Of a sample (n - 1 below); ``None`` for a single value."""
    n = len(values)
    if n < 2:
        return None
    mean = math.fsum(values) / n
    return math.sqrt(math.fsum((value - mean) ** 2 for value in values) / (n - 1))


def mean_interval(values: Sequence[float]) -> tuple[float, float, float]:
    """Mean, low and high; a single value says nothing of its spread, and is all three."""
    n = len(values)
    mean = math.fsum(values) / n
    half = _Z * (standard_deviation(values) or 0.0) / math.sqrt(n)
    return mean, mean - half, mean + half


def ratio_interval(above: Sequence[float], below: Sequence[float]) -> tuple[float, float, float]:
    """The ratio of two sums over the same answers, low and high (the delta method).

    Args:
        above: Such as each answer's tokens.
        below: Such as each answer's seconds; their sum is positive.
    """
    total = math.fsum(below)
    ratio = math.fsum(above) / total
    rests = [a - ratio * b for a, b in zip(above, below, strict=True)]
    half = _Z * (standard_deviation(rests) or 0.0) * math.sqrt(len(rests)) / total
    return ratio, max(0.0, ratio - half), ratio + half
