"""``pyramidkv``: SnapKV with more rows in early layers, fewer in late ones (Cai et al., 2024,
arXiv 2406.02069).

Faithful: SnapKV's scores; budgets fall linearly with depth, down to the mean divided by ``beta``;
no layer gets more than the prompt has outside the window. All layers together hold the budget to
the row. As in kvpress, a layer's window counts within its rows (the published code adds it on top).
Adapted: where the mean divided by ``beta`` can't hold what is protected, the last layer holds just
that (kvpress then gives all layers the same); budgets hold while decoding too, where the paper
compresses the prompt once.
"""

import math
from typing import Any

import torch
from torch import Tensor

from zoomkv.caches.evicting import EvictingLayer
from zoomkv.caches.slots import Slots
from zoomkv.caches.snapkv import SnapKVCache


class PyramidKVCache(SnapKVCache):
    """Keeps what the last ``window`` queries look at, more of it in early layers.

    The budget is the mean over the layers.

    Args:
        model: The causal LM that will use it.
        beta: What the mean is divided by in the last layer, at least 1; larger is steeper.
        **snapkv: As ``SnapKVCache``.

    Raises:
        ValueError: An option out of range.
    """

    name = "pyramidkv"

    def __init__(self, model: Any, beta: float = 20.0, **snapkv: Any) -> None:
        if isinstance(beta, bool) or not isinstance(beta, int | float) or not 1 <= beta < math.inf:
            raise ValueError(f"beta={beta!r}: give a number of at least 1")
        self.beta = float(beta)
        super().__init__(model, **snapkv)

    def _capacity(self, slots: Slots, layer: EvictingLayer) -> Tensor:  # [B]
        rows = super()._capacity(slots, layer)
        prefix = self._protected_prefix()
        if not self._count_prefix:
            return prefix + self._share(rows - prefix, layer.number, torch.tensor(self._recent + 1))
        # Compared with the prompt, as the paper does; a prompt that fits sets no limit.
        assert self.queries is not None
        most = self._prompt - self.queries.size
        most = most.where(most >= rows, 2 * rows)
        return self._share(rows, layer.number, prefix + self._recent + 1, most)

    def _share(
        self,
        mean: Tensor,  # [B]
        number: int,
        least: Tensor,  # [B] or []
        most: Tensor | None = None,  # [B]
    ) -> Tensor:  # [B]
        """Rows of one layer; those of a layer and its mirror image add up to twice the mean."""
        last = self.shape.layers - 1
        if number == last / 2:
            return mean
        low = (mean / self.beta).maximum(least.double())
        high = 2 * mean - low
        if most is not None:
            high = high.minimum(most.double())
            low = 2 * mean - high
        above = (high - min(number, last - number) * (high - low) / last).round().long()
        return above if number < last / 2 else 2 * mean - above
