"""Intervals and tests against published values and symmetry."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zoomkv.evaluation.statistics import mcnemar, wilson


def test_wilson_against_a_table() -> None:
    # Newcombe (1998), table I: 81 of 263, and 0 of 20.
    assert wilson(81, 263) == pytest.approx((0.2553, 0.3662), abs=1e-4)
    assert wilson(0, 20) == pytest.approx((0.0, 0.1611), abs=1e-4)


@given(st.integers(1, 200).flatmap(lambda n: st.tuples(st.integers(0, n), st.just(n))))
def test_wilson_holds_the_share_and_mirrors(case: tuple[int, int]) -> None:
    successes, n = case
    low, high = wilson(successes, n)
    assert low - 1e-12 <= successes / n <= high + 1e-12
    mirrored = wilson(n - successes, n)
    assert mirrored == pytest.approx((1 - high, 1 - low))


def test_mcnemar_counts_only_the_pairs_that_differ() -> None:
    same = [True] * 50
    first, second = same + [True] * 6, same + [False] * 6
    assert mcnemar(first, second) == pytest.approx(2 * 0.5**6)
    assert mcnemar(second, first) == mcnemar(first, second)
    assert mcnemar(same, same) == 1.0
