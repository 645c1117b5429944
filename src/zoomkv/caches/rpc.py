"""``rpc``: Reasoning Path Compression (Song et al., 2025, arXiv 2505.13866).

Faithful: the last queries' softmax runs over the rows that may go and no others (behind the prompt,
before the window), summed over the queries, averaged over all heads of the layer or over those of a
group, then pooled along the sequence; with ``aggregation="all"`` a layer keeps one set of rows.
Adapted: the paper compresses every P tokens to a quarter of what was generated, so its cache grows;
here the budget is fixed, as in BeaconKV's comparison, and the window counts within it.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from zoomkv.caches.budget import check_at_least
from zoomkv.caches.decoding import DecodingCache, WindowLayer
from zoomkv.caches.query_window import QueryWindow
from zoomkv.caches.slots import Slots
from zoomkv.caches.snapkv import check_odd
from zoomkv.ops.observed import pooled, weights_of


class RPCLayer(WindowLayer):
    """Attention of the window among the candidates, pooled."""

    prefix: Tensor  # [B], while scores are asked for: where the candidates begin

    def __init__(self, number: int, slots: Slots, queries: QueryWindow, kernel: int) -> None:
        super().__init__(number, slots, queries)
        self.kernel = kernel

    def score(self, keys: Tensor, values: Tensor, positions: Tensor) -> Tensor:
        """See ``EvictingLayer``."""
        positions = positions.to(keys.device)
        fixed = positions < self.prefix.to(keys.device)[:, None, None]
        # What lies behind the window is no candidate.
        positions = positions.masked_fill(fixed, torch.iinfo(positions.dtype).max)
        scores, candidates, _ = self.observed(keys, positions, candidates_only=True)
        weights = weights_of(scores).sum(3).mean(2)  # [B, Hkv, T]
        if self.slots.heads == 1:
            weights = weights.mean(1, keepdim=True)
        return pooled(weights, positions, candidates, self.kernel, "avg")


class RPCCache(DecodingCache):
    """Keeps what the last ``window`` queries look at among the rows that may go.

    Args:
        model: The causal LM that will use it.
        window: Queries that score, R.
        kernel: Width of the average pooling, odd.
        aggregation: ``all``: a layer keeps the same rows for all its heads; ``group``: each KV head
            keeps rows of its own.
        **protocol: As ``DecodingCache``.

    Raises:
        ValueError: An option out of range.
    """

    name = "rpc"
    watches_prompt = watches_decoding = True

    def __init__(
        self,
        model: Any,
        window: int = 32,
        kernel: int = 7,
        aggregation: str = "all",
        **protocol: Any,
    ) -> None:
        if aggregation not in ("all", "group"):
            raise ValueError(f"aggregation={aggregation!r}: choose one of all, group")
        self.shared_heads = aggregation == "all"
        self.kernel = check_odd("kernel", kernel)
        self.queries = QueryWindow(check_at_least("window", window, 1))
        super().__init__(model, **protocol)

    def make_layer(self, number: int, slots: Slots) -> RPCLayer:
        """See ``DecodingCache``."""
        assert self.queries is not None
        return RPCLayer(number, slots, self.queries, self.kernel)

    def _evict(self, slots: Slots, layers: Sequence[Any], drop: Tensor) -> None:
        layers[0].prefix = self._protected_prefix()
        super()._evict(slots, layers, drop)
        del layers[0].prefix
