"""How near a policy stays to the full cache, along the answer."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from zoomkv.evaluation.report.estimates import mean_interval

_BINS = 48


def bin_width(curves: Sequence[Mapping[str, Sequence[float]]]) -> int:
    """Positions that share a point, so that a curve has at most 48 points.

    Args:
        curves: All that are to be compared, each with its ``position``.
    """
    last = max((max(curve["position"], default=0) for curve in curves), default=0)
    return max(1, math.ceil((last + 1) / _BINS))


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
