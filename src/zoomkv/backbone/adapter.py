"""LoRA adapters with trained delimiter rows: made, saved and loaded in one place."""

from __future__ import annotations

import json
import logging
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from zoomkv.backbone.delimiters import add_to_model

LINEAR_LAYERS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
ADAPTER_FILES = ("adapter_config.json", "adapter_model.safetensors")
_CONFIG, _WEIGHTS = ADAPTER_FILES

# PEFT imports it, and it warns of an optional kernel that a CPU can do without.
logging.getLogger("bitsandbytes.backends.cpu.ops").setLevel(logging.ERROR)


def add_adapter(
    model: Any,
    tokenizer: Any,
    r: int = 16,
    alpha: int = 32,
    dropout: float = 0.0,
    targets: tuple[str, ...] = LINEAR_LAYERS,
) -> Any:
    """The base with fresh adapters on its linear layers and trainable rows for the delimiters.

    Args:
        model: The base, plain or quantised; its own weights are frozen.
        tokenizer: As it was loaded with the model; gets the delimiters.
        r: Rank of the adapters.
        alpha: Their scale, ``alpha / r``.
        dropout: On their input.
        targets: Names of the linear layers that get one.

    Returns:
        A PEFT model. Only adapters and delimiter rows (output rows too, where they are not tied to
        the input rows) require gradients; they are fp32, whatever the base is.
    """
    from peft import LoraConfig

    ids = add_to_model(model, tokenizer)
    model.requires_grad_(False)
    # The list form would train input rows only, and leave an untied head unable to say them.
    tied = model.config.tie_word_embeddings
    rows: Any = ids if tied else {"embed_tokens": ids, "lm_head": ids}
    adapted = _wrapped(
        model,
        LoraConfig(
            r=r,
            lora_alpha=alpha,
            lora_dropout=dropout,
            target_modules=list(targets),
            trainable_token_indices=rows,
            task_type="CAUSAL_LM",
        ),
    )
    return _in_full_precision(adapted)


def load_trained(model: nn.Module, weights: dict[str, Tensor]) -> None:
    """Puts trained weights, named as ``model.named_parameters()`` names them, into a PEFT model.

    Raises:
        ValueError: A weight is missing, unknown, or of another shape.
    """
    wanted = {name: value for name, value in model.named_parameters() if value.requires_grad}
    _check_same(wanted, weights, "the trained weights do not fit this base")
    for name, value in weights.items():
        wanted[name].data.copy_(value)


def save_adapter(model: Any, base: str, folder: Path) -> None:
    """Writes a PEFT model's adapter, without any copy of the embeddings.

    Args:
        model: The PEFT model.
        base: What the base is called; PEFT would write the path from which it was read.
        folder: Where the files go.

    Raises:
        OSError: The disk is full or not writable.
    """
    from safetensors import SafetensorError

    try:
        model.save_pretrained(folder, save_embedding_layers=False)
    except SafetensorError as error:
        raise OSError(f"{folder}: can't be written ({error})") from error
    # PEFT's own card holds nothing but blanks.
    (folder / "README.md").unlink(missing_ok=True)
    path = folder / _CONFIG
    config = json.loads(path.read_text(encoding="utf-8")) | {"base_model_name_or_path": base}
    path.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def load_adapter(model: Any, tokenizer: Any, folder: Path) -> Any:
    """The base with a saved adapter on it, as a PEFT model in evaluation mode.

    Args:
        model: The base.
        tokenizer: As it was loaded with the model; gets the delimiters.
        folder: What ``save_adapter`` wrote.

    Raises:
        ValueError: The files are broken, or lack a weight that this base needs. (PEFT alone would
            warn at most.)
    """
    from peft import PeftConfig
    from peft.utils import get_peft_model_state_dict, set_peft_model_state_dict
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        config = PeftConfig.from_pretrained(str(folder))
        weights = load_file(folder / _WEIGHTS)
    except (OSError, ValueError, TypeError, KeyError, SafetensorError) as error:
        raise ValueError(f"{folder}: can't be read ({error}); export it again") from error
    add_to_model(model, tokenizer)
    config.base_model_name_or_path = None  # artifacts carry a fingerprint, not a path
    adapted = _in_full_precision(_wrapped(model, config))
    wanted = get_peft_model_state_dict(adapted, save_embedding_layers=False)
    _check_same(wanted, weights, f"{folder}: the adapter does not fit this base")
    set_peft_model_state_dict(adapted, weights)
    return adapted.eval()


def _wrapped(model: Any, config: Any) -> Any:
    """A PEFT model, without what PEFT's own use of older names would warn the user of."""
    from peft import get_peft_model

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="`is_gradient_checkpointing` is deprecated")
        return get_peft_model(model, config)


def _in_full_precision(adapted: nn.Module) -> Any:
    """Delimiter rows in fp32: PEFT makes them in the base's type, and bf16 swallows small steps."""
    for name, value in adapted.named_parameters():
        if "trainable_tokens_delta" in name:
            value.data = value.data.to(torch.float32)
    return adapted


def _check_same(wanted: Mapping[str, Tensor], found: Mapping[str, Tensor], what: str) -> None:
    missing, unknown = sorted(wanted.keys() - found.keys()), sorted(found.keys() - wanted.keys())
    if missing or unknown:
        raise ValueError(
            f"{what}: {len(missing)} weights are missing, {len(unknown)} are unknown, "
            f"first {(missing + unknown)[0]}"
        )
    for name, value in wanted.items():
        if value.shape != found[name].shape:
            raise ValueError(
                f"{what}: {name} is {tuple(found[name].shape)}, the base needs {tuple(value.shape)}"
            )
