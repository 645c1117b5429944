"""Means and ratios with their intervals."""

from __future__ import annotations

import random
import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zoomkv.evaluation.report.estimates import mean_interval, ratio_interval, standard_deviation

values = st.lists(st.floats(-1e3, 1e3), min_size=2, max_size=20)


@given(values)
def test_means_and_deviations_are_those_of_the_library(sample: list[float]) -> None:
    spread = statistics.stdev(sample)
    assert standard_deviation(sample) == pytest.approx(spread, abs=1e-9)
    half = 1.959964 * spread / len(sample) ** 0.5
    mean = statistics.fmean(sample)
    assert mean_interval(sample) == pytest.approx((mean, mean - half, mean + half), abs=1e-9)


def test_one_value_has_no_spread() -> None:
    assert standard_deviation([3.0]) is None
    assert mean_interval([3.0]) == (3.0, 3.0, 3.0)
    assert ratio_interval([6.0], [2.0]) == (3.0, 3.0, 3.0)


def test_ratios() -> None:
    assert ratio_interval([10, 20, 40], [1, 2, 4]) == pytest.approx((10, 10, 10))
    # Sums 40 over 4; what is left of 10 s: -1, 1, 0, so a deviation of 1 and sqrt(3) answers.
    found = ratio_interval([9, 21, 10], [1, 2, 1])
    half = 1.959964 * 1.0 * 3**0.5 / 4
    assert found == pytest.approx((10, 10 - half, 10 + half))


def test_intervals_hold_the_truth_as_often_as_they_say() -> None:
    chance = random.Random(3)
    held = 0
    for _ in range(2000):
        seconds = [chance.uniform(1, 3) for _ in range(40)]
        tokens = [12 * each + chance.gauss(0, 4) for each in seconds]
        _, low, high = ratio_interval(tokens, seconds)
        held += low <= 12 <= high
    assert 0.93 < held / 2000 < 0.965
