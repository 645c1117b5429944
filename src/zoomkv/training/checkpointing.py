"""Checkpoints that hold what was trained, and nothing else, and resume exactly."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from torch import nn

FREE_TO_CHANGE = ("generation", "gradient_checkpointing", "attention")
"""Options that a resumed training may have otherwise: they change no trained weight."""


def trained_names(module: nn.Module) -> set[str]:
    """Names of the parameters that training changes."""
    return {name for name, value in module.named_parameters() if value.requires_grad}


def keep_trained(wanted: Collection[str], checkpoint: dict[str, Any]) -> None:
    """Drops every weight from a checkpoint that training does not change."""
    state = checkpoint["state_dict"]
    checkpoint["state_dict"] = {name: value for name, value in state.items() if name in wanted}


def check_trained(wanted: Collection[str], checkpoint: dict[str, Any]) -> None:
    """Lightning loads such a checkpoint without strictness; this is the check in its place.

    Raises:
        ValueError: The checkpoint lacks a trained weight, or holds one that is not known.
    """
    wanted, found = set(wanted), set(checkpoint["state_dict"])
    if wanted != found:
        missing, unknown = sorted(wanted - found), sorted(found - wanted)
        raise ValueError(
            f"checkpoint does not fit this model: {len(missing)} trained weights are missing, "
            f"{len(unknown)} are unknown, first {(missing + unknown)[0]}"
        )


def check_options(given: dict[str, Any], checkpoint: dict[str, Any]) -> None:
    """Refuses a training that is resumed with other options than it began with.

    Learning rates and the like come back with the optimizer's state, so another value would be
    lost without a word; another base or rank would not fit.

    Raises:
        ValueError: Names the first option that differs.
    """
    made_with = checkpoint["hyper_parameters"]
    for name in sorted((given.keys() & made_with.keys()) - set(FREE_TO_CHANGE)):
        now, then = _plain(given[name]), _plain(made_with[name])
        if now != then:
            if isinstance(now, dict) and isinstance(then, dict):
                part = next(key for key in now if now[key] != then.get(key))
                name, now, then = f"{name}.{part}", now[part], then.get(part)
            raise ValueError(
                f"model.{name}: {now} is given, but the checkpoint was made with {then}; "
                "drop the override or train anew"
            )


def rewind_to_step(checkpoint: dict[str, Any], accumulate: int) -> None:
    """Sets a checkpoint's batch count back to its last optimizer step.

    Gradients that were half accumulated are not in a checkpoint. Their batches must be seen
    again, or the resumed run would step with less than a full window.

    Args:
        checkpoint: As Lightning is about to write it; changed in place.
        accumulate: Batches per optimizer step.
    """
    progress = checkpoint["loops"]["fit_loop"]["epoch_loop.batch_progress"]
    half = progress["current"]["processed"] % accumulate
    if half and not progress["is_last_batch"]:
        for counts in (progress["current"], progress["total"]):
            learnt = counts["processed"] - half
            counts.update(ready=learnt, started=learnt, processed=learnt, completed=learnt)


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(part) for key, part in value.items()}
    return list(value) if isinstance(value, tuple) else value
