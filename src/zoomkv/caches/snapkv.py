"""``snapkv``: rows that the last queries look at, smoothed over neighbours (Li et al., 2024,
arXiv 2404.14469).

Faithful: softmax of the window's queries over all keys, scores pooled along the sequence, the
window itself always kept; for each KV head by itself. Adapted: scores are averaged over the query
heads of a group (the paper has no groups), and the same scoring evicts while decoding, as in
BeaconKV's comparison; the paper compresses the prompt once (``count_prefix`` does that too).
"""

from typing import Any

from torch import Tensor

from zoomkv.caches.budget import check_at_least
from zoomkv.caches.decoding import DecodingCache, WindowLayer
from zoomkv.caches.query_window import QueryWindow
from zoomkv.caches.slots import Slots
from zoomkv.ops.observed import mean_over_queries, pooled, weights_of


class SnapKVLayer(WindowLayer):
    """Mean attention of the window, pooled."""

    def __init__(self, number: int, slots: Slots, queries: QueryWindow, kernel: int) -> None:
        super().__init__(number, slots, queries)
        self.kernel = kernel

    def score(self, keys: Tensor, values: Tensor, positions: Tensor) -> Tensor:
        """See ``EvictingLayer``."""
        scores, candidates, present = self.observed(keys, positions)
        mean = mean_over_queries(weights_of(scores), present)
        return pooled(mean, positions.to(keys.device), candidates, self.kernel, "avg")


class SnapKVCache(DecodingCache):
    """Keeps what the last ``window`` queries look at.

    Args:
        model: The causal LM that will use it.
        window: Queries that score.
        kernel: Width of the average pooling, odd.
        **protocol: As ``DecodingCache``.
    """

    name = "snapkv"
    watches_prompt = watches_decoding = True

    def __init__(self, model: Any, window: int = 32, kernel: int = 7, **protocol: Any) -> None:
        self.kernel = check_odd("kernel", kernel)
        self.queries = QueryWindow(check_at_least("window", window, 1))
        super().__init__(model, **protocol)

    def make_layer(self, number: int, slots: Slots) -> SnapKVLayer:
        """See ``DecodingCache``."""
        assert self.queries is not None
        return SnapKVLayer(number, slots, self.queries, self.kernel)


def check_odd(option: str, value: int) -> int:
    """Returns an odd number of at least 1, or raises ValueError."""
    if check_at_least(option, value, 1) % 2 == 0:
        raise ValueError(f"{option}={value}: give an odd number, so that a row is in the middle")
    return value
