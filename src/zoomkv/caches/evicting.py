"""Caches that drop rows for good, to stay within a budget.

A policy fills one hook, ``EvictingLayer.score``: how much each stored row is worth. The base
protects the first and the most recent rows, decides when and how many rows go, and closes the gaps
in place. Keys keep the positions that they were rotated for.
"""

from collections.abc import Iterator, Sequence
from operator import itemgetter
from typing import ClassVar

import torch
from torch import Tensor

from zoomkv.backbone.protocol import Step
from zoomkv.caches.base import ModelShape, PolicyCache, PolicyLayer
from zoomkv.caches.budget import Budget, check_at_least
from zoomkv.caches.slots import Moves, Slots
from zoomkv.caches.tiers import Traffic
from zoomkv.caches.working_sets import ResidentSet


class EvictingLayer(PolicyLayer):
    """One layer of an evicting cache.

    Args:
        number: Of the layer.
        slots: ``Slots(kv_heads)`` of its own, or one ``Slots()`` shared by all layers, if the
            policy keeps the same rows everywhere; then the first layer's scores decide.
    """

    side_bytes: ClassVar[int] = 0
    """Bytes that a policy keeps on the device for each stored row and KV head besides K and V."""

    def __init__(self, number: int, slots: Slots) -> None:
        super().__init__(number, slots, ResidentSet())

    def score(
        self,
        keys: Tensor,  # [B, Hkv, T, D]
        values: Tensor,  # [B, Hkv, T, D]
        positions: Tensor,  # [B, heads of the slots, T]
    ) -> Tensor:  # [B, heads of the slots, T]
        """What each stored row is worth; the lowest go first, of equal ones the oldest.

        Rows stand in any order. Entries beyond a batch row's own count are ignored, and so are
        those of protected rows.
        """
        raise NotImplementedError

    def moved(self, moves: Moves) -> None:
        """Rows changed their slots: a policy with state for each row moves that too."""

    def row_bytes(self) -> int:
        """Device bytes of K and V of one row."""
        rows = self.working_set.rows  # type: ignore[union-attr]
        assert rows is not None
        return sum(t.shape[3] * t.element_size() for t in rows.tensors())


class EvictingCache(PolicyCache):
    """Base of the caches that drop rows.

    Args:
        shape: Of the model.
        layers: One for each layer of the model.
        budget: Rows, or a share of full KV; bounds all device bytes in row equivalents.
        prefix: Tokens at the start of each row that are never dropped; None: its whole prompt.
        recent: Newest tokens that are never dropped.
        interval: Rows that are dropped at once, when the budget is full; a fraction is a share of
            the budget, rounded up.
        room: Rows that must fit besides those that are never dropped, at least ``interval``.
        count_prefix: Whether everything on the device counts within the budget. If not, the prefix
            does not, nor does what the policy keeps besides rows.

    Raises:
        ValueError: If the budget can't hold what is protected; says what is enough.
    """

    _capacities: dict[int, Tensor]  # by group, as long as a budget in rows makes them last

    def __init__(
        self,
        shape: ModelShape,
        layers: Sequence[EvictingLayer],
        budget: int | float,
        *,
        prefix: int | None,
        recent: int,
        interval: int | float = 1,
        room: int = 1,
        count_prefix: bool = True,
    ) -> None:
        self._prefix = prefix
        self._recent = check_at_least("recent", recent, 0)
        self._interval = interval
        if not isinstance(interval, float):
            room = max(room, check_at_least("interval", interval, 1))
        self._room = room
        self._smallest = (prefix or 0 if count_prefix else 0) + recent + room
        self._count_prefix = count_prefix
        self.evicted = 0
        """Rows dropped so far, summed over the batch, of one layer."""
        super().__init__(shape, layers, Traffic())
        self._budget = Budget.parse(budget, *max(self.rules(), key=itemgetter(0)))

    def prompt_started(self, first: bool) -> None:
        """See ``PolicyCache``: until the prompt is read, nothing is bounded."""
        for slots, layers in self.groups:
            self._set_ceiling(slots, layers, None)

    def prompt_read(self, added: Tensor) -> None:
        """See ``PolicyCache``."""
        if bool((self._lengths == added).all()):
            self._prompt = self._lengths
        self._capacities = {}
        self._keep_budget(None)

    def prepare(self, step: Step) -> None:
        """See ``PolicyCache``."""
        self._keep_budget(step.added)

    def select(self, rows: Tensor) -> None:
        """See ``PolicyCache``."""
        super().select(rows)
        self._prompt = self._prompt[rows]
        self._capacities = {}

    def host_tensors(self) -> Iterator[Tensor]:
        """See ``PolicyCache``."""
        yield from super().host_tensors()
        yield from (self._prompt, *self._capacities.values())

    def _start(self, batch: int, device: torch.device) -> None:
        super()._start(batch, device)
        self._prompt = torch.zeros(batch, dtype=torch.int64)
        self._capacities = {}
        self.evicted = 0

    def _protected_prefix(self) -> Tensor:  # [B]
        if self._prefix is None:
            return self._prompt
        return torch.full_like(self._lengths, self._prefix)

    def capacity(self, group: int) -> Tensor:  # [B]
        """Rows that fit each batch row's budget, in the layers of one of ``groups``."""
        if group not in self._capacities or isinstance(self._budget.value, float):
            slots, layers = self.groups[group]
            self._capacities[group] = self._capacity(slots, layers[0])
        return self._capacities[group]

    def _capacity(self, slots: Slots, layer: EvictingLayer) -> Tensor:  # [B]
        """Rows that fit each batch row's budget, which also holds what indexes them."""
        prefix = self._protected_prefix()
        if isinstance(self._budget.value, int):
            # Only now are the prompt's length and the keys' precision certain.
            Budget.parse(self._budget.value, *self._rule_of_rows(int(prefix.max())))
        rows = self._budget.rows(self._lengths).clamp(min=self._smallest)
        row, each = self._row_bytes()
        capacity = (rows - self._overhead_rows()) * row // each
        if not self._count_prefix:
            capacity = capacity + prefix
        # A short text's share may be too small for anything.
        return capacity.maximum(prefix + self._recent + self._room)

    def rules(self) -> Iterator[tuple[int, str]]:
        """What a budget in rows must come to, by each rule, and how the rule reads."""
        yield self._rule_of_rows(self._prefix or 0)

    def budget_for(self, stored: int) -> int:
        """The smallest budget in rows that holds so many stored ones and what indexes them."""
        row, each = self._row_bytes()
        return -(-stored * each // row) + self._overhead_rows()

    def _rule_of_rows(self, prefix: int) -> tuple[int, str]:
        stay = self._recent + (prefix if self._count_prefix else 0)
        least = self.budget_for(stay + self._room)
        why = f"{stay} must stay, {self._room} more must fit"
        if index := least - stay - self._room:
            why = f"{why}, and what indexes and scores them takes the bytes of {index}"
        return least, why

    def _row_bytes(self) -> tuple[int, int]:
        """Device bytes of K and V of a row, and of these and what a policy keeps beside them.

        Before there are keys, these of the model's weights.
        """
        layer = self.layers[0]
        row = 2 * self.shape.head_dim * self.shape.element_bytes
        if layer.is_initialized:
            row = layer.row_bytes()
        return row, row + layer.side_bytes + layer.slots.bytes_per_row

    def _overhead_rows(self) -> int:
        if not self._count_prefix:
            return 0
        row, _ = self._row_bytes()
        element = self.shape.element_bytes
        if self.layers[0].is_initialized:
            element = self.layers[0].stored()[0].element_size()
        overhead = self.overhead(element)
        return -(-overhead // (row * self.shape.kv_heads * self.shape.layers))

    @property
    def counts_everything(self) -> bool:
        """Whether the budget bounds all device bytes."""
        return self._count_prefix

    def overhead(self, element_bytes: int) -> int:
        """Device bytes that a policy keeps for one batch row, however many rows are stored.

        Args:
            element_bytes: Of one number of a query or key.
        """
        return 0

    def _interval_of(self, capacity: Tensor) -> Tensor:  # [B] -> [B]
        """Rows to drop at once: never so many that protected ones would have to go."""
        prefix = self._protected_prefix()
        rows = torch.full_like(capacity, self._interval)
        if isinstance(self._interval, float):
            counted = capacity if self._count_prefix else capacity - prefix
            rows = (counted * self._interval).ceil().long().clamp(min=1)
        return rows.minimum(capacity - prefix - self._recent)

    def _keep_budget(self, coming: Tensor | None) -> None:  # [B]
        """Drops rows, in every layer, until those that are coming fit; None: a prompt has come."""
        for number, (slots, layers) in enumerate(self.groups):
            capacity = self.capacity(number)
            over = slots.count + (0 if coming is None else coming) > capacity
            if bool(over.any()):
                target = capacity
                if coming is not None:
                    target = capacity - self._interval_of(capacity)
                drop = torch.where(over, slots.count - target, 0)
                self._evict(slots, layers, drop)
            self._set_ceiling(slots, layers, int(capacity.max()))

    def _evict(self, slots: Slots, layers: Sequence[EvictingLayer], drop: Tensor) -> None:  # [B]
        keys, values = layers[0].stored()
        device = keys.device
        positions = slots.positions[:, :, : slots.length]
        # Under autocast even a product of fp32 tensors is half precise.
        with torch.autocast(device.type, enabled=False):
            score = layers[0].score(keys, values, positions).to(positions.device)
        keep = ~_lowest(score, positions, self._droppable(slots, positions), drop)
        with self.moving():
            moves = slots.change(keep)
            there = moves.on(device)
            for layer in layers:
                layer.working_set.move(there.source, there.target)
                layer.moved(there)
        if slots is self.groups[0][0]:
            self.evicted += int(drop.sum())

    def _droppable(self, slots: Slots, positions: Tensor) -> Tensor:  # bool, as positions
        first = self._protected_prefix().to(positions.device)[:, None, None]
        last = (self._lengths - self._recent).to(positions.device)[:, None, None]
        return (positions >= first) & (positions < last) & slots.valid()

    def _set_ceiling(
        self, slots: Slots, layers: Sequence[EvictingLayer], capacity: int | None
    ) -> None:
        if slots.ceiling == capacity:
            return
        slots.limit(capacity)
        for layer in layers:
            layer.working_set.limit(capacity)


def _lowest(
    score: Tensor,  # [B, heads, T]
    positions: Tensor,  # [B, heads, T]
    droppable: Tensor,  # bool [B, heads, T]
    drop: Tensor,  # [B]
) -> Tensor:  # bool [B, heads, T]
    """Marks, in each batch row and head, the ``drop`` droppable slots of lowest score."""
    by_age = positions.argsort(dim=-1)
    score = score.masked_fill(~droppable, torch.inf if score.is_floating_point() else 2**31 - 1)
    order = by_age.gather(-1, score.gather(-1, by_age).argsort(dim=-1, stable=True))
    rank = torch.arange(score.shape[-1], device=score.device)
    lowest = (rank < drop.to(score.device)[:, None, None]).expand_as(order)
    return torch.zeros_like(droppable).scatter(-1, order, lowest)
