"""``chunkkv``: stretches of text that the last queries look at (Liu et al., 2025,
arXiv 2502.00299).

Faithful: positions fall into chunks of fixed length; each is worth what the window's queries see in
it, and goes or stays as a whole; the window stays. As in kvpress, tokens have SnapKV's scores
(pooled), a chunk has their mean, and all heads of a layer keep the same chunks. Adapted: a budget
is met to the row, so of the last chunk to go perhaps only the oldest rows do; chunks also go while
decoding, as in BeaconKV's comparison. Left out: reusing one layer's choice in the next.
"""

from typing import Any

from torch import Tensor

from zoomkv.caches.budget import check_at_least
from zoomkv.caches.query_window import QueryWindow
from zoomkv.caches.slots import Slots
from zoomkv.caches.snapkv import SnapKVCache, SnapKVLayer
from zoomkv.ops.observed import mean_over_queries, pooled, weights_of


class ChunkKVLayer(SnapKVLayer):
    """SnapKV's scores, averaged over chunks."""

    def __init__(
        self, number: int, slots: Slots, queries: QueryWindow, kernel: int, chunk_length: int
    ) -> None:
        super().__init__(number, slots, queries, kernel)
        self.chunk_length = chunk_length

    def score(self, keys: Tensor, values: Tensor, positions: Tensor) -> Tensor:
        """See ``EvictingLayer``."""
        scores, candidates, present = self.observed(keys, positions)
        positions = positions.to(keys.device)
        mean = mean_over_queries(weights_of(scores), present)
        token = pooled(mean, positions, candidates, self.kernel, "avg")
        # The window's rows are worth more than all others, so a chunk that it begins in gains.
        above = token.masked_fill(~candidates, 0.0).amax((1, 2), keepdim=True) + 1
        token = token.where(candidates, above).sum(1)  # [B, T]

        valid = self.slots.valid().to(keys.device)[:, 0]
        chunk = positions[:, 0].long().masked_fill(~valid, 0) // self.chunk_length
        count = token.new_zeros(len(token), int(chunk.max()) + 1)
        total = count.scatter_add(1, chunk, token.masked_fill(~valid, 0.0))
        count = count.scatter_add(1, chunk, valid.to(token.dtype))
        return (total / count.clamp(min=1)).gather(1, chunk)[:, None]


class ChunkKVCache(SnapKVCache):
    """Keeps the chunks that the last ``window`` queries look at.

    Args:
        model: The causal LM that will use it.
        chunk_length: Positions of a chunk.
        **snapkv: As ``SnapKVCache``.

    Raises:
        ValueError: An option out of range.
    """

    name = "chunkkv"
    shared_heads = True

    def __init__(self, model: Any, chunk_length: int = 20, **snapkv: Any) -> None:
        self.chunk_length = check_at_least("chunk_length", chunk_length, 1)
        super().__init__(model, **snapkv)

    def make_layer(self, number: int, slots: Slots) -> ChunkKVLayer:
        """See ``DecodingCache``."""
        assert self.queries is not None
        return ChunkKVLayer(number, slots, self.queries, self.kernel, self.chunk_length)
