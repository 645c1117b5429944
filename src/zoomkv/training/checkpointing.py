"""Checkpoints that hold what was trained, and nothing else, and resume exactly."""

from __future__ import annotations

from typing import Any

from torch import nn


def trained_names(module: nn.Module) -> set[str]:
    """Names of the parameters that training changes."""
    return {name for name, value in module.named_parameters() if value.requires_grad}


def keep_trained(module: nn.Module, checkpoint: dict[str, Any]) -> None:
    """Drops every weight from a checkpoint that training does not change."""
    state = checkpoint["state_dict"]
    wanted = trained_names(module)
    checkpoint["state_dict"] = {name: value for name, value in state.items() if name in wanted}


def check_trained(module: nn.Module, checkpoint: dict[str, Any]) -> None:
    """Lightning loads such a checkpoint without strictness; this is the check in its place.

    Raises:
        ValueError: The checkpoint lacks a trained weight, or holds one that is not known.
    """
    wanted, found = trained_names(module), set(checkpoint["state_dict"])
    if wanted != found:
        missing, unknown = sorted(wanted - found), sorted(found - wanted)
        raise ValueError(
            f"checkpoint does not fit this model: {len(missing)} trained weights are missing "
            f"(first: {missing[:1]}), {len(unknown)} are unknown (first: {unknown[:1]})"
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
