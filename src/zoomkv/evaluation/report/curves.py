"""How near a policy stays to the full cache, along the answer."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

from zoomkv.evaluation.report.estimates import mean_interval

_BINS = 48


def bin_width(curves: Sequence[Mapping[str, Sequence[float]]]) -> int:
    """Positions that share a point, so that a curve has at most 48 points of whole bins of its own.

    Args:
        curves: All that are to be compared, each with its ``position``.
    """
    places = sorted({int(place) for curve in curves for place in curve["position"]})
    step = min((after - before for before, after in pairwise(places)), default=1)
    return step * max(1, math.ceil((max(places, default=0) + step) / (step * _BINS)))


def mean_curve(curves: Sequence[Mapping[str, Sequence[float]]], width: int) -> dict[str, Any]:
    """The mean of several answers' curves, with 95 % intervals over the answers.

    Args:
        curves: ``position``, ``kl`` and ``top1`` of each answer, lists of one length.
        width: Positions that share a point; each answer counts there once, with its mean.

    Returns:
        Lists: ``position`` (the first of each bin), ``n`` (answers), and for ``kl`` (nats) and
        ``top1`` (a share) the mean under its name, ``*_low`` and ``*_high``.
    """
    bins: dict[int, dict[str, list[float]]] = defaultdict(lambda: {"kl": [], "top1": []})
    for curve in curves:
        own: dict[int, list[int]] = defaultdict(list)
        for place, position in enumerate(curve["position"]):
            own[int(position) // width].append(place)
        for number, places in own.items():
            for name, values in bins[number].items():
                values.append(math.fsum(float(curve[name][at]) for at in places) / len(places))
    found: dict[str, list[float]] = {"position": [], "n": []}
    found |= {f"{name}{end}": [] for name in ("kl", "top1") for end in ("", "_low", "_high")}
    for number, means in sorted(bins.items()):
        found["position"].append(number * width)
        found["n"].append(len(means["kl"]))
        for name, most in (("kl", math.inf), ("top1", 1.0)):
            mean, low, high = mean_interval(means[name])
            found[name].append(mean)
            found[f"{name}_low"].append(max(0.0, low))
            found[f"{name}_high"].append(min(most, high))
    return found
