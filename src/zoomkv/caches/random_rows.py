"""``random``: rows drawn by lot, a control for whatever claims to know better.

A row's lot depends on seed, layer, KV head and position alone, so what is kept is at any time a
uniform sample of all that could have been, the same in every run, copy and batch.
"""

from typing import Any

import torch
from torch import Tensor

from zoomkv.caches.budget import check_at_least
from zoomkv.caches.decoding import DecodingCache
from zoomkv.caches.evicting import EvictingLayer
from zoomkv.caches.slots import Slots


class RandomLayer(EvictingLayer):
    """A lot for each row."""

    def __init__(self, number: int, slots: Slots, seed: int) -> None:
        super().__init__(number, slots)
        self.seed = check_at_least("seed", seed, 0)

    def score(self, keys: Tensor, values: Tensor, positions: Tensor) -> Tensor:
        """See ``EvictingLayer``."""
        head = torch.arange(positions.shape[1], device=positions.device)[:, None]
        lot = torch.full_like(positions, self.seed, dtype=torch.int64)
        for part in (self.number, head, positions):
            lot = scrambled(lot) + part
        return scrambled(lot) & (1 << 30) - 1


def scrambled(number: Tensor) -> Tensor:  # int64
    """One whole number for each, as if at random (the finaliser of splitmix64)."""
    # Products wrap; a shift to the right brings in copies of the sign, which are masked away.
    number = (number + 1) * -0x61C8864680B583EB
    number = (number ^ (number >> 30 & (1 << 34) - 1)) * -0x40A7B892E31B1A47
    number = (number ^ (number >> 27 & (1 << 37) - 1)) * -0x6B2FB644ECCEEE15
    return number ^ (number >> 31 & (1 << 33) - 1)


class RandomCache(DecodingCache):
    """Keeps rows drawn by lot, for each layer and KV head by itself.

    Args:
        model: The causal LM that will use it.
        seed: Of the lots, from 0 to below 2^31.
        **protocol: As ``DecodingCache``.

    Raises:
        ValueError: An option out of range.
    """

    name = "random"

    def __init__(self, model: Any, seed: int = 0, **protocol: Any) -> None:
        self.seed = check_at_least("seed", seed, 0)
        super().__init__(model, **protocol)

    def make_layer(self, number: int, slots: Slots) -> RandomLayer:
        """See ``DecodingCache``."""
        return RandomLayer(number, slots, self.seed)
