"""``streaming_llm``: attention sinks and a sliding window (Xiao et al., 2023).

Keys keep their absolute positions. The paper renumbers positions within the cache; most ports,
and this one, do not.
"""

from typing import Any

from torch import Tensor

from zoomkv.caches.base import ModelShape
from zoomkv.caches.budget import check_at_least
from zoomkv.caches.evicting import EvictingCache, EvictingLayer
from zoomkv.caches.slots import Slots


class StreamingLayer(EvictingLayer):
    """The older a row, the sooner it goes."""

    def score(self, keys: Tensor, values: Tensor, positions: Tensor) -> Tensor:
        """See ``EvictingLayer``."""
        return positions


class StreamingLLMCache(EvictingCache):
    """Keeps the first ``n_sink`` tokens and as many of the newest as the budget allows.

    The prompt counts like any other text, and the sinks count within the budget.

    Args:
        model: The causal LM that will use it.
        budget: Rows, or a share of full KV.
        n_sink: Tokens at the start that stay.

    Raises:
        ValueError: If the budget does not exceed the sinks.
    """

    name = "streaming_llm"

    def __init__(self, model: Any, budget: int | float = 1024, n_sink: int = 4) -> None:
        check_at_least("n_sink", n_sink, 0)
        shape, slots = ModelShape.of(model), Slots()
        layers = [StreamingLayer(number, slots) for number in range(shape.layers)]
        super().__init__(shape, layers, budget, prefix=n_sink, recent=0)
