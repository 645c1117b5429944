"""Queries and keys of chosen tokens, layer by layer, for losses on what the heads look at."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class AttentionInput:
    """What one attention module read in a forward pass."""

    module: Any
    hidden: Tensor
    """``[B, T, hidden]``, after the layer's norm."""
    cos: Tensor
    """``[B or 1, T, D]``."""
    sin: Tensor

    def queries(self, batch: Tensor, position: Tensor) -> Tensor:  # [n], [n] -> [n, H, D]
        """Queries of some tokens, after RoPE."""
        return self._rotated("q", batch, position)

    def keys(self, batch: Tensor, position: Tensor) -> Tensor:  # [n], [n] -> [n, Hkv, D]
        """Keys of some tokens, after RoPE."""
        return self._rotated("k", batch, position)

    def _rotated(self, which: str, batch: Tensor, position: Tensor) -> Tensor:
        projected = getattr(self.module, f"{which}_proj")(self.hidden[batch, position])
        heads = projected.view(len(batch), -1, self.module.head_dim)
        norm = getattr(self.module, f"{which}_norm", None)  # Qwen3
        heads = heads if norm is None else norm(heads)
        of = batch.clamp(max=self.cos.shape[0] - 1)
        cos, sin = self.cos[of, position][:, None], self.sin[of, position][:, None]
        first, second = heads.chunk(2, dim=-1)
        return heads * cos + torch.cat((-second, first), dim=-1) * sin


@contextmanager
def attention_inputs(decoder: Any) -> Iterator[list[AttentionInput]]:
    """Collects what every attention module reads while the block runs, in layer order.

    Args:
        decoder: The model's decoder. Not under gradient checkpointing, whose first pass has no
            gradients.
    """
    collected: list[AttentionInput] = []

    def keep(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        hidden = args[0] if args else kwargs["hidden_states"]
        collected.append(AttentionInput(module, hidden, *kwargs["position_embeddings"]))

    handles = [
        layer.self_attn.register_forward_pre_hook(keep, with_kwargs=True)
        for layer in decoder.layers
    ]
    try:
        yield collected
    finally:
        for handle in handles:
            handle.remove()
