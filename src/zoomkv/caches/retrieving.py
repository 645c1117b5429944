"""Caches that keep every row on the host and read some of them.

A policy says which positions are readable (``RetrievingCache.read_only``), or what goes and comes
(``RetrievingCache.exchange``). The base archives each row, drops from the working sets what is not
readable and fetches what is missing: rows that stay don't move between the tiers.
"""

from collections.abc import Iterator, Sequence
from typing import Literal, get_args

import torch
from torch import Tensor

from zoomkv.caches.base import ModelShape, PolicyCache, PolicyLayer
from zoomkv.caches.codecs import check_precision
from zoomkv.caches.slots import Moves, Slots, exchange
from zoomkv.caches.tiers import HostRows, Traffic, make_row_codec, settle
from zoomkv.caches.working_sets import DoubleBuffer, ResidentSet, StreamedSet, WorkingSet

Residency = Literal["resident", "streamed"]

_SLACK = 64  # rows of a working set that may lie idle after a change


class RetrievingLayer(PolicyLayer):
    """One layer: a working set, and an archive of all rows in the order of their positions."""

    def __init__(
        self, number: int, slots: Slots, working_set: WorkingSet, precision: str, traffic: Traffic
    ) -> None:
        super().__init__(number, slots, working_set)
        self._precision = precision
        self._traffic = traffic
        self._archive: HostRows | None = None

    @property
    def archive(self) -> HostRows:
        """Everything that the layer has stored."""
        assert self._archive is not None
        return self._archive

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """See ``PolicyLayer``."""
        codec = make_row_codec(self._precision, key_states, value_states)
        self._archive = HostRows(key_states, value_states, codec, self._traffic)
        super().lazy_initialization(key_states, value_states)

    def reset(self) -> None:
        """See ``PolicyLayer``."""
        super().reset()
        self._archive = None

    def select(self, rows: Tensor) -> None:
        """See ``PolicyLayer``."""
        super().select(rows)
        if self._archive is not None:
            self._archive.select(rows)

    def host_tensors(self) -> Iterator[Tensor]:
        """See ``PolicyLayer``."""
        yield from super().host_tensors()
        if self._archive is not None:
            yield from self._archive.tensors()


class RetrievingCache(PolicyCache):
    """Base of the caches that lose nothing.

    Args:
        shape: Of the model.
        residency: ``resident`` keeps each layer's working set on the device; ``streamed`` keeps
            it on the host and brings it to the device in every forward, two layers at a time.
        host_precision: ``auto`` archives rows as they are; ``int8`` and ``nf4`` quantise them.
        shared: Whether all layers and heads read the same positions.

    Raises:
        ValueError: Unknown residency or precision.
    """

    def __init__(
        self, shape: ModelShape, residency: str, host_precision: str, shared: bool = True
    ) -> None:
        check_precision(host_precision)
        if residency not in get_args(Residency):
            raise ValueError(
                f"residency={residency!r}: choose one of {', '.join(get_args(Residency))}"
            )
        traffic, one = Traffic(), Slots()
        self._streamed = residency == "streamed"
        window, every = DoubleBuffer(), range(shape.layers)
        sets: Sequence[WorkingSet] = (
            [StreamedSet(window, number, host_precision, traffic) for number in every]
            if self._streamed
            else [ResidentSet() for _ in every]
        )
        layers = [
            RetrievingLayer(
                number,
                one if shared else Slots(shape.kv_heads, on_host=True),
                working_set,
                host_precision,
                traffic,
            )
            for number, working_set in enumerate(sets)
        ]
        self._archived = torch.zeros(0, dtype=torch.int64)
        super().__init__(shape, layers, traffic)

    @property
    def slots(self) -> Slots:
        """The index, or the first of several: all hold equally many rows, those added last last."""
        return self.groups[0][0]

    def archive_rows(self) -> None:
        """Writes to the host what it does not have yet."""
        pending = self._lengths - self._archived  # the last rows of each working set
        last = self.slots.count
        slot = torch.arange(self.slots.length)
        new = (slot >= (last - pending)[:, None]) & (slot < last[:, None])
        batch, slot = new.nonzero(as_tuple=True)
        position = self.slots.positions[batch, 0, slot].long()
        settle(self._device)
        on = self._set_device()
        source = (batch.to(on), slice(None), slot.to(on))
        longest = int(self._lengths.max())
        for layer in self.layers:
            layer.archive.reserve(longest)
            parts = layer.working_set.export(source, layer.archive)
            layer.archive.put((batch, slice(None), position), parts)
        self._archived = self._lengths

    def read_only(self, readable: Tensor, rows: Tensor) -> None:
        """Makes the working sets of some batch rows hold the readable positions, no others.

        Every stored row must be archived, and all layers and heads read the same positions. Takes
        effect with the next forward.

        Args:
            readable: Bool ``[B, T]``.
            rows: Which batch rows change, bool ``[B]``.
        """
        wanted, rows, slots = readable[:, None], rows[:, None, None], self.slots
        total = readable.shape[1]
        positions = slots.positions[..., : slots.length].long().clamp(max=total - 1)
        keep = wanted.gather(-1, positions) | ~rows
        missing = wanted & ~slots.readable(total) & rows
        self.exchange(keep[None], missing[None].nonzero(as_tuple=True))

    def exchange(self, keep: Tensor, missing: tuple[Tensor, ...]) -> None:
        """Drops rows from the working sets and fetches others.

        Every stored row must be archived. Takes effect with the next forward.

        Args:
            keep: Which slots of each index stay, bool ``[groups, B, heads, length]``.
            missing: Rows to fetch: group, batch row, head and position, each ``[n]``, in this
                order. As many go and come in all groups and heads of a batch row.
        """
        with self.moving():
            moves = exchange([slots for slots, _ in self.groups], keep, missing)
            split, there = (
                m.split(len(self.groups)) for m in (moves, moves.on(self._set_device()))
            )
            for (_, layers), here, index in zip(self.groups, split, there, strict=True):
                for layer in layers:
                    self._rearrange(layer, here, index)

    def select(self, rows: Tensor) -> None:
        """See ``PolicyCache``."""
        super().select(rows)
        self._archived = self._archived[rows]

    def host_tensors(self) -> Iterator[Tensor]:
        """See ``PolicyCache``."""
        yield from super().host_tensors()
        yield self._archived

    def _start(self, batch: int, device: torch.device) -> None:
        super()._start(batch, device)
        self._archived = torch.zeros(batch, dtype=torch.int64)

    def _set_device(self) -> torch.device:
        """Where the working sets are indexed."""
        return torch.device("cpu") if self._streamed else self._device

    @staticmethod
    def _rearrange(layer: RetrievingLayer, moves: Moves, there: Moves) -> None:
        working_set = layer.working_set
        if len(moves.source[0]):  # type: ignore[arg-type]
            working_set.move(there.source, there.target)
        if len(moves.fetch_from[0]):  # type: ignore[arg-type]
            working_set.reserve(moves.length)
            parts = layer.archive.take(moves.fetch_from)
            working_set.admit(there.fetch_to, layer.archive, parts)
        working_set.fit(moves.length, _SLACK)
