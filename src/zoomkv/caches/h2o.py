"""``h2o``: rows that got most attention so far, and the newest (Zhang et al., 2023,
arXiv 2306.14048).

Faithful: every query of prompt and answer adds its attention to the rows that it reads; the rows
with the largest sums (heavy hitters) stay beside a window of the newest, half of the cache each.
Adapted: sums are over the query heads of a group (the paper has no groups) and kept for each batch
row by itself (the published code adds the batch up); an eighth goes at once, not a row in each step
(``refill`` near 1 does that), under the protocol of BeaconKV's comparison or, with
``count_prefix``, under a budget for everything.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from zoomkv.backbone.protocol import Step
from zoomkv.caches.budget import check_at_least, check_flag
from zoomkv.caches.decoding import DecodingCache
from zoomkv.caches.evicting import EvictingLayer
from zoomkv.caches.slots import Moves, Slots
from zoomkv.ops.attention import attention_weights
from zoomkv.ops.observed import attention_received

_GROWTH = 64


class Received:
    """Attention that the stored rows of all layers have received, slot by slot.

    Attributes:
        queries: Queries so far that could be counted, ``[B]``, CPU.
    """

    queries: Tensor

    def __init__(self) -> None:
        self.start(0)

    def start(self, batch: int) -> None:
        """Begins anew with nothing."""
        self._sums: Tensor | None = None  # [L, B, Hkv, C], zeros where no row is
        self.queries = torch.zeros(batch, dtype=torch.int64)

    def of(self, layer: int, length: int) -> Tensor:  # [B, Hkv, length]
        """Sums of a layer's first rows."""
        assert self._sums is not None
        return self._sums[layer, :, :, :length]

    def add(self, step: Step, ceiling: int | None) -> None:
        """Adds what rows got in a step, ``step.observations``; room grows up to ``ceiling``."""
        new = torch.stack(step.observations)  # [L, B, Hkv, T]
        length = new.shape[3]
        if self._sums is None:
            self._sums = new.new_zeros(*new.shape[:3], 0)
        capacity = self._sums.shape[3]
        if length > capacity:
            wanted = -(-length // _GROWTH) * _GROWTH
            if ceiling is not None:
                wanted = max(length, min(wanted, ceiling))
            self._sums = F.pad(self._sums, (0, wanted - capacity))
        self._sums[..., :length] += new
        self.queries = self.queries + step.added

    def move(self, layer: int, moves: Moves, count: Tensor) -> None:  # [B]
        """Sums follow their rows; slots from ``count`` on are free again."""
        assert self._sums is not None
        sums = self._sums[layer]
        sums[moves.target] = sums[moves.source]
        slot = torch.arange(sums.shape[2], device=sums.device)
        sums.masked_fill_(slot >= count.to(sums.device)[:, None, None], 0.0)

    def fit(self, ceiling: int | None) -> None:
        """Gives room beyond ``ceiling`` back."""
        if self._sums is not None and ceiling is not None and self._sums.shape[3] > ceiling:
            self._sums = self._sums[..., :ceiling].clone()

    def select(self, rows: Tensor) -> None:  # [B'] CPU
        """Keeps the given batch rows, in the given order; one may come twice."""
        self.queries = self.queries[rows]
        if self._sums is not None:
            self._sums = self._sums[:, rows.to(self._sums.device)]

    def device_tensors(self) -> Sequence[Tensor]:
        """What lies on the device."""
        return [] if self._sums is None else [self._sums]


class H2OLayer(EvictingLayer):
    """The less attention a row got, the sooner it goes."""

    side_bytes = 4

    def __init__(self, number: int, slots: Slots, received: Received, normalised: bool) -> None:
        super().__init__(number, slots)
        self.received = received
        self.normalised = normalised

    def score(self, keys: Tensor, values: Tensor, positions: Tensor) -> Tensor:
        """See ``EvictingLayer``."""
        sums = self.received.of(self.number, keys.shape[2])
        if not self.normalised:
            return sums
        # A stored row was there for every query since its own.
        queries = self.received.queries.to(sums.device)[:, None, None] - positions.to(sums.device)
        return sums / queries.clamp(min=1)

    def moved(self, moves: Moves) -> None:
        """See ``EvictingLayer``."""
        self.received.move(self.number, moves, self.slots.count)


class H2OCache(DecodingCache):
    """Keeps the newest rows and those that got most attention.

    Args:
        model: The causal LM that will use it.
        recent: Newest rows that are never dropped; None: half of the rows that the budget leaves
            to a layer and head, sinks apart.
        normalised: Whether sums are divided by the number of queries that could see the row (as
            kvpress's ObservedAttention does), so that old rows have no advantage.
        **protocol: As ``DecodingCache``.

    Raises:
        ValueError: An option out of range.
    """

    name = "h2o"
    watches_prompt = True

    def __init__(
        self,
        model: Any,
        recent: int | None = None,
        normalised: bool = False,
        **protocol: Any,
    ) -> None:
        self.normalised = check_flag("normalised", normalised)
        self.received = Received()
        self._half = recent is None
        recent = 1 if recent is None else check_at_least("recent", recent, 0)
        super().__init__(model, recent=recent, **protocol)

    def make_layer(self, number: int, slots: Slots) -> H2OLayer:
        """See ``DecodingCache``."""
        return H2OLayer(number, slots, self.received, self.normalised)

    def watch(self, step: Step, layer: int, query: Tensor, key: Tensor) -> Tensor:
        """See ``PolicyCache``."""
        if step.in_prompt and self._prefix is None and not bool(self._prompt_start.any()):
            # All rows are the prompt's, which stay whatever they get.
            return torch.zeros(key.shape[:3], device=key.device)
        place = step.placements[layer]
        return attention_received(query, key, place.stored, place.mask, step.real)

    @property
    def reads_itself(self) -> bool:
        """See ``PolicyCache``: attention's own weights are what is summed, so they are kept."""
        return not self._in_prompt

    def read(
        self,
        step: Step,
        layer: int,
        query: Tensor,  # [B, H, 1, D]
        key: Tensor,  # [B, Hkv, T, D]
        value: Tensor,  # [B, Hkv, T, D]
        scaling: float,
    ) -> Tensor:  # [B, H, 1, D]
        """See ``PolicyCache``."""
        output, weights = attention_weights(query, key, value, step.placements[layer].mask, scaling)
        received = weights.sum(2)
        if step.real is not None:
            received.masked_fill_(~step.real[:, :, None].to(received.device), 0.0)
        step.observations.append(received)
        return output

    def watched(self, step: Step) -> None:
        """See ``PolicyCache``."""
        self.received.add(step, self.layers[0].slots.ceiling)

    def decoded(self, step: Step, hidden: Tensor) -> None:
        """See ``PolicyCache``."""
        self.watched(step)

    def select(self, rows: Tensor) -> None:
        """See ``PolicyCache``."""
        super().select(rows)
        self.received.select(rows)

    def device_tensors(self) -> Any:
        """See ``PolicyCache``."""
        yield from super().device_tensors()
        yield from self.received.device_tensors()

    def host_tensors(self) -> Any:
        """See ``PolicyCache``."""
        yield from super().host_tensors()
        yield self.received.queries

    def _start(self, batch: int, device: torch.device) -> None:
        super()._start(batch, device)
        self.received.start(batch)

    def _keep_budget(self, coming: Tensor | None) -> None:  # [B]
        super()._keep_budget(coming)
        self.received.fit(self.layers[0].slots.ceiling)

    def _newest(self, capacity: Tensor) -> Tensor:  # [B] -> [B]
        """Rows of the window."""
        return (capacity - self._protected_prefix()) // 2

    def _interval_of(self, capacity: Tensor) -> Tensor:
        rows = super()._interval_of(capacity)
        if self._half:
            rows = rows.minimum(capacity - self._protected_prefix() - self._newest(capacity))
        return rows

    def _droppable(self, slots: Slots, positions: Tensor) -> Tensor:
        droppable = super()._droppable(slots, positions)
        if self._half:
            newest = self._newest(self.capacity(0))  # the same in all layers
            last = (self._lengths - newest).to(positions.device)
            droppable = droppable & (positions < last[:, None, None])
        return droppable
