"""LoRA adapters with trained delimiter rows: made, saved and loaded in one place."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import Tensor

from zoomkv.backbone.delimiters import add_to_model

LINEAR_LAYERS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def add_adapter(
    model: Any,
    tokenizer: Any,
    delimiter_ids: list[int],
    r: int = 16,
    alpha: int = 32,
    dropout: float = 0.0,
    targets: tuple[str, ...] = LINEAR_LAYERS,
) -> Any:
    """The base with fresh adapters on its linear layers and trainable rows for the delimiters.

    Args:
        model: The base, plain or quantised; its own weights are frozen.
        tokenizer: With the delimiters added.
        delimiter_ids: ``[begin, end]``.
        r: Rank of the adapters.
        alpha: Their scale, ``alpha / r``.
        dropout: On their input.
        targets: Names of the linear layers that get one.

    Returns:
        A PEFT model. Only adapters and delimiter rows (output rows too, where they are not tied to
        the input rows) require gradients.
    """
    from peft import LoraConfig, get_peft_model

    add_to_model(model, tokenizer, delimiter_ids)
    model.requires_grad_(False)
    # The list form would train input rows only, and leave an untied head unable to say them.
    rows: Any = list(delimiter_ids)
    if not model.config.tie_word_embeddings:
        rows = {"embed_tokens": rows, "lm_head": rows}
    return get_peft_model(
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


def load_trained(model: Any, weights: dict[str, Tensor]) -> None:
    """Puts trained weights, named as ``model.named_parameters()`` names them, into a PEFT model.

    Raises:
        ValueError: A weight is missing, unknown, or of another shape.
    """
    wanted = {name: value for name, value in model.named_parameters() if value.requires_grad}
    if wanted.keys() != weights.keys():
        odd = sorted(wanted.keys() ^ weights.keys())
        raise ValueError(f"the trained weights do not fit this base: {len(odd)} differ, {odd[0]}")
    for name, value in weights.items():
        if wanted[name].shape != value.shape:
            raise ValueError(
                f"the trained weights do not fit this base: {name} is {tuple(value.shape)}, "
                f"the base needs {tuple(wanted[name].shape)}"
            )
        wanted[name].data.copy_(value)


def save_adapter(model: Any, folder: Path) -> None:
    """Writes a PEFT model's adapter, without any copy of the embeddings."""
    model.save_pretrained(folder, save_embedding_layers=False)
    # PEFT's own card holds nothing but blanks.
    (folder / "README.md").unlink(missing_ok=True)


def load_adapter(model: Any, tokenizer: Any, delimiter_ids: list[int], folder: Path) -> Any:
    """The base with a saved adapter on it, as a PEFT model in evaluation mode."""
    from peft import PeftModel

    add_to_model(model, tokenizer, delimiter_ids)
    return PeftModel.from_pretrained(model, str(folder)).eval()
