"""From a training checkpoint to an artifact."""

from __future__ import annotations

import os
from collections.abc import Callable
from math import isfinite
from pathlib import Path
from typing import Any

import torch

from zoomkv.backbone.adapter import add_adapter, load_trained, save_adapter
from zoomkv.backbone.delimiters import add_to_tokenizer
from zoomkv.backbone.fingerprint import describe_mismatch, fingerprint
from zoomkv.backbone.load import load_base
from zoomkv.export.artifact import (
    ADAPTER,
    ROUTERS,
    TRAINED_WITH,
    Artifact,
    save_router,
    write_artifact,
)
from zoomkv.spans.thoughts import BEGIN_OF_SUMMARY, END_OF_SUMMARY

METADATA = "zoomkv"
"""Key of a training checkpoint under which all that export needs is found."""


def export_checkpoint(
    source: str | os.PathLike[str],
    target: str | os.PathLike[str],
    options: dict[str, Any] | None = None,
    figures: dict[str, Any] | None = None,
    note: str | None = None,
) -> Artifact:
    """Exports a training checkpoint.

    Args:
        source: A ``.ckpt`` file, or a run's folder: its newest ``last*.ckpt`` is taken.
        target: The artifact's folder.
        options: Options of the policy that it was trained for, where they should differ from the
            policy's defaults.
        figures: What was measured, for the model card, besides the training's own metrics.
        note: How it was trained, in words, for the model card.

    Returns:
        The manifest that was written.

    Raises:
        ValueError: No checkpoint there, or one that training here did not write, or whose base is
            another one now.
        OSError: The artifact can't be written; an older one is intact.
    """
    path = find_checkpoint(Path(source))
    metadata, weights = read_checkpoint(path)
    model, tokenizer = load_base(metadata["base"], device="cpu")
    found = fingerprint(model)
    if difference := describe_mismatch(metadata["fingerprint"], found):
        raise ValueError(f"{path}: its base '{metadata['base']}' is another one now: {difference}")
    weights_of = _router if "router" in metadata else _adapter
    what, save_weights = weights_of(path, metadata, weights, model, tokenizer)
    artifact = Artifact(
        method=metadata["method"],
        base=metadata["base"],
        # Taken anew: on a quantised base the training could not digest the linear layers.
        fingerprint=found,
        **what,
        training={
            "steps": metadata["steps"],
            "base precision": metadata["precision"],
            **({"lora": metadata["lora"]} if "lora" in metadata else {}),
            **({"how": note} if note else {}),
        },
        figures={
            **{name: value for name, value in metadata["metrics"].items() if isfinite(value)},
            **(figures or {}),
        },
        options=options or {},
    )
    write_artifact(target, artifact, save_weights)
    return artifact


_Weights = tuple[dict[str, Any], Callable[[Path], None]]


def _adapter(
    path: Path, metadata: dict[str, Any], weights: dict[str, Any], model: Any, tokenizer: Any
) -> _Weights:
    adapted = add_adapter(model, tokenizer, **metadata["lora"])
    ids = add_to_tokenizer(tokenizer)
    if ids != metadata["delimiter_ids"]:
        raise ValueError(f"{path}: delimiter ids {metadata['delimiter_ids']} are {ids} now")
    load_trained(adapted, weights)
    delimiters = dict(zip((BEGIN_OF_SUMMARY, END_OF_SUMMARY), ids, strict=True))
    return {"delimiters": delimiters}, lambda folder: save_adapter(
        adapted, metadata["base"], folder / ADAPTER
    )


def _router(
    path: Path, metadata: dict[str, Any], weights: dict[str, Any], model: Any, tokenizer: Any
) -> _Weights:
    form = metadata["form"]
    if form not in ROUTERS:
        raise ValueError(f"{path}: a router of the form '{form}' is not known; upgrade zoomkv")
    router = ROUTERS[form](**metadata["router"])
    # The attribute of the module that was trained, which its weights are named by.
    prefix = {"sketch": "sketch.", "paper": "router."}[form]
    own = {n.removeprefix(prefix): value for n, value in weights.items() if n.startswith(prefix)}
    router.load_state_dict(own)
    told = {name: metadata[name] for name in TRAINED_WITH if form == "paper"}
    what = {"form": form, **metadata["router"], **told}
    return {"delimiters": {}, "router": what}, lambda folder: save_router(router, folder)


def find_checkpoint(source: Path) -> Path:
    """The checkpoint file that ``source`` names or, as a run's folder, holds."""
    if source.is_dir():
        # A resumed run may have written last-v1.ckpt beside the older last.ckpt.
        found = sorted(source.rglob("last*.ckpt"), key=lambda path: path.stat().st_mtime)
        if not found:
            raise ValueError(f"{source}: there is no last.ckpt in this run; name a .ckpt file")
        return found[-1]
    if not source.is_file():
        raise ValueError(f"{source}: there is no such checkpoint or run")
    return source


def read_checkpoint(path: Path) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """What a training checkpoint says of itself, and its trained weights by the model's names.

    Raises:
        ValueError: It can't be read, or is not one of ``zoomkv fit``.
    """
    try:
        checkpoint = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # torch raises a dozen kinds for a broken file
        raise ValueError(f"{path}: not a readable checkpoint ({type(error).__name__})") from error
    if not isinstance(checkpoint, dict) or METADATA not in checkpoint:
        raise ValueError(f"{path}: not a checkpoint of zoomkv fit")
    prefix = "model."
    state = checkpoint["state_dict"]
    return checkpoint[METADATA], {name.removeprefix(prefix): state[name] for name in state}
