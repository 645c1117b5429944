"""Arms of a comparison under one definition of budget.

A budget is a share of what the full cache would hold, or a number of rows of each layer and KV
head. It bounds all device bytes of a cache, indexes and prompt included: policies that can leave
the prompt out of account (``count_prefix``) are run so that they don't. ``zoomr`` and ``sumr`` have
no budget of their own; other policies can be tuned to the bytes that they take.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from inspect import Parameter
from typing import Any

from zoomkv.caches.registry import check_options, options_of
from zoomkv.evaluation.settings import ArmSettings, Settings, tuned_label
from zoomkv.export.artifact import is_artifact, read_artifact


@dataclass(frozen=True)
class Arm:
    """One policy with all that it is run with, but for what its budget comes to."""

    policy: str
    label: str
    options: dict[str, Any]
    """Without the budget."""
    model: str
    budgets: tuple[int | float | None, ...]
    """Each is run; None is a policy without a budget."""
    reference: str | None = None
    """Label of the arm whose bytes this one is tuned to; then there is one budget, still None."""

    def at(self, budget: int | float | None) -> dict[str, Any]:
        """The options under a budget."""
        return self.options if budget is None else {**self.options, "budget": budget}


def arms_of(settings: Settings) -> list[Arm]:
    """What a run compares: policies without a budget first, then those with one, then the tuned.

    Raises:
        ValueError: An unknown policy or option, one that is needed and not given, or two arms of
            one label.
    """
    free: list[Arm] = []
    bounded: list[Arm] = []
    tuned: list[Arm] = []
    for given in settings.policies:
        arm = _arm(given, settings)
        _check_needed(arm)
        (free if arm.budgets == (None,) else bounded).append(arm)
        tuned += [_tuned(policy, arm, settings) for policy in given.match]
    arms = free + bounded + tuned
    labels = [arm.label for arm in arms]
    for label in labels:
        if labels.count(label) > 1:
            raise ValueError(f"policies: {label!r} comes up twice: give one of them another label")
    return arms


def tuned_option(policy: str) -> str:
    """The option by which a policy is brought to another's bytes: ``budget``, else ``window``.

    Raises:
        ValueError: It has neither.
    """
    options = options_of(policy)
    for name in ("budget", "window"):
        if name in options and (name != "budget" or options[name] is not None):
            return name
    raise ValueError(f"policy {policy!r} has neither budget nor window, so match can't tune it")


def matching(
    measure: Callable[[int], float],
    target: float,
    first_guess: int,
    tolerance: float = 0.005,
    rounds: int = 12,
) -> int:
    """The value at which a policy takes as many device bytes as another.

    Args:
        measure: Device bytes at a value of the option, such as a window or a budget in rows; they
            must grow with it.
        target: Device bytes to come to.
        first_guess: Where to begin.
        tolerance: Relative distance from the target that will do.
        rounds: Most measurements.
    """
    value = first_guess
    tried: dict[int, float] = {}
    while value not in tried and len(tried) < rounds:
        tried[value] = measure(value)
        if abs(tried[value] / target - 1) <= tolerance:
            return value
        value = _next_guess(tried, target)
    return min(tried, key=lambda tried_value: abs(tried[tried_value] - target))


def _next_guess(tried: dict[int, float], target: float) -> int:
    """Along the line through the two measurements nearest to the target."""
    near = sorted(tried, key=lambda value: abs(tried[value] - target))[:2]
    if len(near) == 1:
        return max(1, round(near[0] * target / tried[near[0]]))
    low, high = sorted(near)
    slope = (tried[high] - tried[low]) / (high - low)
    if slope <= 0:
        return max(1, round(near[0] * target / tried[near[0]]))
    return max(1, round(near[0] + (target - tried[near[0]]) / slope))


def _arm(given: ArmSettings, settings: Settings) -> Arm:
    model, options = given.model or settings.model, dict(given.options)
    if is_artifact(model):
        artifact = read_artifact(model)
        if artifact.method == given.policy:
            options = {**artifact.options, **options}
    check_options(given.policy, options)
    known = options_of(given.policy)
    if "count_prefix" in known:
        options.setdefault("count_prefix", True)
    budgets: Sequence[int | float | None] = (None,)
    if "budget" in options:
        budgets = (options.pop("budget"),)
        if given.budgets is not None:
            raise ValueError(
                f"policies: {given.label}: give budgets, or a budget among the options"
            )
    elif given.budgets is not None:
        if "budget" not in known:
            raise ValueError(f"policies: {given.label}: this policy has no budget")
        budgets = given.budgets
    elif known.get("budget") is not None:
        budgets = settings.budgets
        if not budgets:
            raise ValueError(f"budgets: name at least one, for {given.label}")
    return Arm(given.policy, given.label, options, model, tuple(budgets))


def _check_needed(arm: Arm) -> None:
    """Of a policy of one's own, options may have no default."""
    for name, default in options_of(arm.policy).items():
        if default is Parameter.empty and name not in arm.at(arm.budgets[0]):
            raise ValueError(f"policies: {arm.label}: it needs the option {name!r}: give it one")


def _tuned(policy: str, reference: Arm, settings: Settings) -> Arm:
    given = next(iter(settings.named(policy)), ArmSettings(policy))
    option = tuned_option(given.policy)
    options = {name: value for name, value in given.options.items() if name != option}
    arm = _arm(replace(given, options=options, budgets=None, model=reference.model), settings)
    arm.options.pop(option, None)  # an artifact's own
    label = tuned_label(given.label, reference.label)
    return replace(arm, label=label, budgets=(None,), reference=reference.label)
