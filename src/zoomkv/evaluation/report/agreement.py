"""How ZoomR's agreeability runs over selection steps, for right and for wrong answers.

Agreeability is the share of all votes that went to the paragraphs read in full (ZoomR,
arXiv 2604.10898, section 4.3; its figures 3d and 3e are drawn from what stands here).
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

from zoomkv.evaluation.report.estimates import mean_interval, standard_deviation

Course = Sequence[float | None]
"""One answer's agreeability, by selection step; ``None`` where there was nothing to choose."""

_LEAST = 2  # answers of each kind that a step needs to be compared


def dynamics(right: Sequence[Course], wrong: Sequence[Course]) -> dict[str, Any]:
    """The two groups' courses, and how they compare.

    Steps with fewer than two right or two wrong answers are drawn but not compared. The crossover
    is the step up to which the right answers' summed lead is largest: from there on, however far
    one looks, wrong answers agree more on balance. For curves that cross once it is their
    crossing, and noise moves it little.

    Args:
        right: Of the right answers.
        wrong: Of the others.

    Returns:
        ``right`` and ``wrong``: ``answers``, and lists by step (from 1): ``step``, ``n``, ``mean``,
        ``low`` and ``high`` (95 % interval of the mean), ``sd`` (``None`` with one answer). Then
        ``compared`` (steps), ``crossover`` (a step, or ``None`` if right answers lead on balance up
        to the end, or never), ``early_gap`` (mean lead of the right answers up to the crossover,
        or over all compared steps), ``right_sd`` and ``wrong_sd`` (mean over compared steps).
    """
    groups = {"right": _course(right), "wrong": _course(wrong)}
    by_step = [
        {step: place for place, step in enumerate(group["step"])} for group in groups.values()
    ]
    common = [
        (step, place, by_step[1][step])
        for step, place in by_step[0].items()
        if step in by_step[1]
        and groups["right"]["n"][place] >= _LEAST
        and groups["wrong"]["n"][by_step[1][step]] >= _LEAST
    ]
    found: dict[str, Any] = {**groups, "compared": len(common)}
    found |= dict.fromkeys(("crossover", "early_gap", "right_sd", "wrong_sd"))
    if not common:
        return found
    gaps = [groups["right"]["mean"][a] - groups["wrong"]["mean"][b] for _, a, b in common]
    leads = list(accumulate(gaps, initial=0.0))
    best = leads.index(max(leads))
    crosses = 0 < best < len(gaps)
    early = gaps[:best] if crosses else gaps
    found["crossover"] = common[best - 1][0] if crosses else None
    found["early_gap"] = sum(early) / len(early)
    found["right_sd"] = sum(groups["right"]["sd"][a] for _, a, _ in common) / len(common)
    found["wrong_sd"] = sum(groups["wrong"]["sd"][b] for _, _, b in common) / len(common)
    return found


def _course(courses: Sequence[Course]) -> dict[str, Any]:
    course: dict[str, Any] = {"answers": len(courses)}
    course |= {name: [] for name in ("step", "n", "mean", "low", "high", "sd")}
    for step in range(max(map(len, courses), default=0)):
        values = [
            value for each in courses if step < len(each) and (value := each[step]) is not None
        ]
        if not values:
            continue
        mean, low, high = mean_interval(values)
        course["step"].append(step + 1)
        course["n"].append(len(values))
        course["mean"].append(mean)
        course["low"].append(max(0.0, low))
        course["high"].append(min(1.0, high))
        course["sd"].append(standard_deviation(values))
    return course
