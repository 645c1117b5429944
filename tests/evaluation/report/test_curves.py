"""Mean curves along answers."""

from __future__ import annotations

import pytest

from zoomkv.evaluation.report.curves import bin_width, mean_curve


def curve(positions: list[float], kl: list[float], top1: list[float]) -> dict[str, list[float]]:
    return {"position": positions, "kl": kl, "top1": top1}


def test_hand_computed() -> None:
    long = curve([0, 1, 2, 3, 4], [0.0, 0.2, 0.4, 0.6, 5.0], [1, 1, 0, 1, 0])
    short = curve([0, 1, 2], [0.2, 0.2, 0.8], [1, 0, 0])
    found = mean_curve([long, short], 2)
    assert found["position"] == [0, 2, 4] and found["n"] == [2, 2, 1]
    # By answer and bin: 0.1 and 0.2, 0.5 and 0.8, 5.
    assert found["kl"] == pytest.approx([0.15, 0.65, 5.0])
    assert found["top1"] == pytest.approx([0.75, 0.25, 0.0])
    half = 1.959964 * 0.05  # the deviation of 0.1 and 0.2, by the root of two
    assert found["kl_low"][0] == pytest.approx(0.15 - half)
    assert found["kl_high"][0] == pytest.approx(0.15 + half)
    assert found["top1_high"][0] == 1.0 and found["kl_low"][2] == found["kl_high"][2] == 5.0


@pytest.mark.parametrize(
    ("last", "step", "width"), [(0, 1, 1), (47, 1, 1), (48, 1, 2), (1000, 16, 32), (700, 16, 16)]
)
def test_curves_have_at_most_48_points_of_whole_bins(last: int, step: int, width: int) -> None:
    positions = [float(place) for place in range(0, last + 1, step)]
    only = curve(positions, [0.1] * len(positions), [1.0] * len(positions))
    assert bin_width([only]) == width
    found = mean_curve([only], bin_width([only]))
    assert len(found["position"]) <= 48
    assert found["kl"] == pytest.approx([0.1] * len(found["position"]))
