"""Agreeability over steps: hand-computed courses, and where they cross."""

from __future__ import annotations

import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zoomkv.evaluation.report.agreement import dynamics


def parallel(values: list[float]) -> list[list[float]]:
    """Two answers around the given means."""
    return [[value - 0.05 for value in values], [value + 0.05 for value in values]]


def test_hand_computed() -> None:
    found = dynamics(
        [[0.9, 0.8, 0.5], [0.7, 0.6, 0.3], [0.8]],
        [[0.4, 0.5, 0.7], [0.6, 0.7, 0.9]],
    )
    assert found["right"]["answers"] == 3 and found["wrong"]["answers"] == 2
    assert found["right"]["step"] == [1, 2, 3] and found["right"]["n"] == [3, 2, 2]
    assert found["right"]["mean"] == pytest.approx([0.8, 0.7, 0.4])
    assert found["right"]["sd"] == pytest.approx([0.1, 0.02**0.5, 0.02**0.5])
    half = 1.959964 * 0.1 / 3**0.5
    assert found["right"]["low"][0] == pytest.approx(0.8 - half)
    assert found["right"]["high"][0] == pytest.approx(0.8 + half)
    # Leads 0.3, 0.1, -0.4: the right answers' sum is largest at step 2.
    assert found["compared"] == 3 and found["crossover"] == 2
    assert found["early_gap"] == pytest.approx(0.2)
    assert found["right_sd"] == pytest.approx((0.1 + 2 * 0.02**0.5) / 3)
    assert found["wrong_sd"] == pytest.approx(0.02**0.5)


def test_curves_that_never_cross() -> None:
    ahead = dynamics(parallel([0.8, 0.7]), parallel([0.5, 0.5]))
    assert ahead["crossover"] is None and ahead["early_gap"] == pytest.approx(0.25)
    behind = dynamics(parallel([0.5, 0.5]), parallel([0.8, 0.7]))
    assert behind["crossover"] is None and behind["early_gap"] == pytest.approx(-0.25)


@given(st.integers(1, 30), st.integers(1, 30))
def test_curves_that_cross_once_cross_there(before: int, after: int) -> None:
    right = parallel([0.6] * before + [0.4] * after)
    wrong = parallel([0.5] * (before + after))
    found = dynamics(right, wrong)
    assert found["crossover"] == before
    assert found["early_gap"] == pytest.approx(0.1)


courses = st.lists(
    st.lists(st.one_of(st.none(), st.floats(0, 1)), max_size=6), min_size=0, max_size=5
)


@given(courses, courses)
def test_against_a_slow_reference(
    right: list[list[float | None]], wrong: list[list[float | None]]
) -> None:
    found = dynamics(right, wrong)
    gaps, spreads = {}, {}
    for step in range(6):
        values = [
            [each[step] for each in group if step < len(each) and each[step] is not None]
            for group in (right, wrong)
        ]
        for name, group in zip(("right", "wrong"), values, strict=True):
            assert (step + 1 in found[name]["step"]) == bool(group)
            if group:
                at = found[name]["step"].index(step + 1)
                assert found[name]["mean"][at] == pytest.approx(statistics.fmean(group))
                assert 0 <= found[name]["low"][at] <= found[name]["mean"][at] + 1e-9
        if min(map(len, values)) >= 2:
            gaps[step + 1] = statistics.fmean(values[0]) - statistics.fmean(values[1])
            spreads[step + 1] = [statistics.stdev(group) for group in values]
    assert found["compared"] == len(gaps)
    if not gaps:
        assert found["crossover"] is None and found["early_gap"] is None
        return
    if found["crossover"] is not None:
        early = [gap for step, gap in gaps.items() if step <= found["crossover"]]
        late = [gap for step, gap in gaps.items() if step > found["crossover"]]
        assert late and sum(early) > 0 >= sum(late) - 1e-9
        assert found["early_gap"] == pytest.approx(statistics.fmean(early), abs=1e-9)
    else:
        assert found["early_gap"] == pytest.approx(statistics.fmean(gaps.values()), abs=1e-9)
    expected = [statistics.fmean(spread[at] for spread in spreads.values()) for at in (0, 1)]
    assert [found["right_sd"], found["wrong_sd"]] == pytest.approx(expected, abs=1e-9)


def test_too_few_answers_are_not_compared() -> None:
    found = dynamics([[0.5, 0.6]], [])
    assert found["compared"] == 0 and found["crossover"] is None and found["early_gap"] is None
    assert found["right"]["sd"] == [None, None] and found["right"]["low"] == [0.5, 0.6]
