"""What identifies a base model, however it was loaded."""

from __future__ import annotations

import hashlib
from typing import Any

import torch
from torch import Tensor, nn

SAMPLED_ROWS = 64


def fingerprint(model: nn.Module) -> dict[str, str | None]:
    """Digests that tell one base model from another, the same in fp32, bf16, NF4 and int8.

    Embeddings and norms stay unquantised in every precision, so ``embeddings`` can always be
    compared. ``linear`` samples the projections and is ``None`` on a quantised base.

    Args:
        model: A causal language model as loaded, before tokens or adapters are added.

    Returns:
        ``{"architecture", "embeddings", "linear"}``; the first is readable, the others hex.
    """
    config: Any = model.config
    architecture = (
        f"{config.model_type} layers={config.num_hidden_layers} hidden={config.hidden_size} "
        f"heads={config.num_attention_heads}/{config.num_key_value_heads} vocab={config.vocab_size}"
    )
    decoder = model.get_decoder()  # type: ignore[operator]
    kept = [decoder.embed_tokens.weight, decoder.norm.weight]
    linear: list[Tensor] = []
    for layer in decoder.layers:
        kept += [layer.input_layernorm.weight, layer.post_attention_layernorm.weight]
        linear += [layer.self_attn.q_proj.weight, layer.mlp.down_proj.weight]
    quantised = not all(weight.is_floating_point() for weight in linear)
    return {
        "architecture": architecture,
        "embeddings": _digest(kept),
        "linear": None if quantised else _digest(linear),
    }


def describe_mismatch(expected: dict[str, Any], found: dict[str, Any]) -> str | None:
    """One line that says how two fingerprints differ, or ``None`` when they agree."""
    for part, wanted in expected.items():
        have = found.get(part)
        if wanted is not None and have is not None and wanted != have:
            return f"{part}: expected {wanted}, found {have}"
    return None


def _digest(weights: list[Tensor]) -> str:
    sha = hashlib.sha256()
    for weight in weights:
        rows = torch.linspace(0, weight.shape[0] - 1, min(SAMPLED_ROWS, weight.shape[0])).long()
        sample = weight.detach()[rows.to(weight.device)].to(torch.bfloat16).cpu().contiguous()
        sha.update(sample.view(torch.int16).numpy().tobytes())
    return sha.hexdigest()[:32]
