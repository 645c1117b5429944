"""A prompt read once, and given to as many caches as are to be compared."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from zoomkv.backbone.replaced import replaced_attention
from zoomkv.caches.base import PolicyCache
from zoomkv.ops.attention import grouped_attention


@dataclass(frozen=True)
class Recording:
    """All that a cache sees of a forward over one text, whole: prompts attend to all of themselves.

    Reading a prompt of some thousand tokens costs more than answering a question about it; policies
    that are told of the same forward are compared for the price of one.
    """

    ids: Tensor
    """``[1, T]``"""
    queries: list[Tensor]
    """After RoPE, ``[1, H, T, D]`` for each layer."""
    keys: list[Tensor]
    """After RoPE, ``[1, Hkv, T, D]``."""
    values: list[Tensor]
    """``[1, Hkv, T, D]``"""
    hidden: Tensor
    """After the final norm, ``[1, T, hidden]``."""

    def feed(self, cache: PolicyCache, stop: int) -> None:
        """Reads the text up to a token into a cache, as one forward of the model would.

        Args:
            cache: Has seen nothing. What it expects of its prompt is its own affair.
            stop: Tokens to read.
        """
        ids = self.ids[:, :stop]
        step = cache.begin(ids, None, None)
        for layer, (query, key, value) in enumerate(
            zip(self.queries, self.keys, self.values, strict=True)
        ):
            read, _ = cache.update(key[:, :, :stop], value[:, :, :stop], layer)
            if step.observer is not None:
                seen = step.observer(step, layer, query[:, :, :stop], read)
                step.observations.append(seen)
        cache.commit(step, self.hidden[:, :stop])


@torch.no_grad()
def record(model: Any, ids: Tensor) -> Recording:  # [1, T]
    """Runs a model over a text and keeps all that its caches would see.

    Args:
        model: A causal LM of a supported family, attached or not.
        ids: The text, without padding.
    """
    queries: list[Tensor] = []
    keys: list[Tensor] = []
    values: list[Tensor] = []

    def attend(layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Tensor:
        for kept, x in ((queries, query), (keys, key), (values, value)):
            kept.append(x)
        return grouped_attention(query, key, value, scale=scaling, causal=True)

    with replaced_attention(model, attend):
        output = model.get_decoder()(input_ids=ids)
    return Recording(ids, queries, keys, values, output[0])
