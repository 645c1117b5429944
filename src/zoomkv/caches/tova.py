"""``tova``: rows that the last query looks at (Oren et al., 2024, arXiv 2401.06104).

Faithful: softmax of the last query over all rows, averaged over all heads of a layer, which keeps
one set of rows for all of them. Adapted: the newest row always stays (as in kvpress; the published
code may drop it), and an eighth goes at once, scored by one query; the paper drops a row in each
step, which ``refill`` near 1 (0.9999) does.
"""

from typing import Any

from torch import Tensor

from zoomkv.caches.decoding import DecodingCache, WindowLayer
from zoomkv.caches.query_window import QueryWindow
from zoomkv.caches.slots import Slots
from zoomkv.ops.observed import weights_of


class TOVALayer(WindowLayer):
    """Attention of the last query, one score for all heads."""

    def score(self, keys: Tensor, values: Tensor, positions: Tensor) -> Tensor:
        """See ``EvictingLayer``."""
        scores, _, _ = self.observed(keys, positions)
        return weights_of(scores).mean((1, 2, 3))[:, None]


class TOVACache(DecodingCache):
    """Keeps what the last query looks at.

    Args:
        model: The causal LM that will use it.
        recent: Newest rows that are never dropped.
        **protocol: As ``DecodingCache``.

    Raises:
        ValueError: An option out of range.
    """

    name = "tova"
    watches_prompt = watches_decoding = True
    shared_heads = True

    def __init__(self, model: Any, recent: int = 1, **protocol: Any) -> None:
        self.queries = QueryWindow(1)
        super().__init__(model, recent=recent, **protocol)

    def make_layer(self, number: int, slots: Slots) -> TOVALayer:
        """See ``DecodingCache``."""
        assert self.queries is not None
        return TOVALayer(number, slots, self.queries)
