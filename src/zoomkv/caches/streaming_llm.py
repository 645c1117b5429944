"""``streaming_llm``: attention sinks and a sliding window (Xiao et al., 2023, arXiv 2309.17453).

Faithful: the first tokens and the newest stay, and a row goes in each step. Adapted: keys keep
their absolute positions, as in most ports, where the paper renumbers them within the cache; without
``count_prefix`` the whole prompt stays, as in BeaconKV's comparison.
"""

from typing import Any

from torch import Tensor

from zoomkv.caches.base import ModelShape
from zoomkv.caches.budget import check_at_least, check_flag
from zoomkv.caches.evicting import EvictingCache, EvictingLayer
from zoomkv.caches.slots import Slots


class StreamingLayer(EvictingLayer):
    """The older a row, the sooner it goes."""

    def score(self, keys: Tensor, values: Tensor, positions: Tensor) -> Tensor:
        """See ``EvictingLayer``."""
        return positions


class StreamingLLMCache(EvictingCache):
    """Keeps the first ``n_sink`` tokens and as many of the newest as the budget allows.

    Args:
        model: The causal LM that will use it.
        budget: Rows, or a share of full KV.
        n_sink: Tokens at the start that stay, if the prompt counts; they count too.
        count_prefix: Whether the prompt counts like any other text. If not, all of it stays, and
            the budget is for the newest rows behind it.

    Raises:
        ValueError: If the budget does not exceed the sinks.
    """

    name = "streaming_llm"

    def __init__(
        self,
        model: Any,
        budget: int | float = 1024,
        n_sink: int = 4,
        count_prefix: bool = True,
    ) -> None:
        check_at_least("n_sink", n_sink, 0)
        check_flag("count_prefix", count_prefix)
        shape, slots = ModelShape.of(model), Slots()
        layers = [StreamingLayer(number, slots) for number in range(shape.layers)]
        super().__init__(
            shape,
            layers,
            budget,
            prefix=n_sink if count_prefix else None,
            recent=0,
            count_prefix=count_prefix,
        )
