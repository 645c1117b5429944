"""Rows of a context: all of them on the host, those that a query has asked for on the device."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from zoomkv.caches.tiers import Parts, RowCodec, Traffic, allocate, size_of

_GROWTH = 256


class RowSource(Protocol):
    """A layer's context on the host, in whatever form."""

    moved: Tensor
    """Bytes that went to the device for each batch row, int64 ``[B]``."""

    def take(
        self, batch: Tensor, head: Tensor, position: Tensor
    ) -> tuple[Tensor, Tensor]:  # 3 x [n] -> 2 x [n, D]
        """Rows of one head each, on the device."""

    def keys(self, length: int) -> Tensor:  # [B, Hkv, length, D]
        """The first keys, on the device; not counted as traffic."""

    def select(self, rows: Tensor) -> None:  # [B'] CPU
        """Keeps the given batch rows."""

    def tensors(self) -> Iterator[Tensor]:
        """All that is allocated."""


class ContextRows:
    """One layer's rows on the host, by position, in one piece: a step gathers them in one go.

    Pinned when the model runs on CUDA.
    """

    def __init__(self, keys: Tensor, values: Tensor, codec: RowCodec, traffic: Traffic) -> None:
        """Nothing yet, for rows like the given ones ``[B, Hkv, *, D]``."""
        self._codec = codec
        self._traffic = traffic
        self._device = keys.device
        like = codec.encode(keys[:, :, :0].detach(), values[:, :, :0].detach())
        self._parts: Parts = tuple(part.cpu() for part in like)
        self.moved = torch.zeros(len(keys), dtype=torch.int64)
        """Bytes that went to the device for each batch row."""

    def put(
        self,
        batch: Tensor,  # [n]
        position: Tensor,  # [n]
        keys: Tensor,  # [n, Hkv, D]
        values: Tensor,  # [n, Hkv, D]
    ) -> None:
        """Stores rows of all heads."""
        self._reserve(int(position.max()) + 1 if len(position) else 0)
        parts = self._codec.encode(keys, values)
        self._traffic.to_host += size_of(parts)
        for stored, part in zip(self._parts, parts, strict=True):
            stored[batch, :, position] = part.to("cpu")

    def take(
        self, batch: Tensor, head: Tensor, position: Tensor
    ) -> tuple[Tensor, Tensor]:  # 3 x [n] -> 2 x [n, D]
        """Rows of one head each, on the device."""
        _, heads, capacity, _ = self._parts[0].shape
        index = ((batch * heads + head) * capacity + position).to("cpu")
        parts = tuple(part.flatten(0, 2).index_select(0, index) for part in self._parts)
        self._traffic.to_device += (size := size_of(parts))
        row = batch.to("cpu").bincount(minlength=len(self.moved))
        self.moved = self.moved + row * (size // max(len(index), 1))
        return self._codec.decode(tuple(p.to(self._device, non_blocking=True) for p in parts))

    def keys(self, length: int) -> Tensor:  # [B, Hkv, length, D]
        """The first keys, on the device; not counted as traffic."""
        parts = tuple(part[:, :, :length] for part in self._parts)
        return self._codec.decode(parts)[0].to(self._device)

    def select(self, rows: Tensor) -> None:  # [B'] CPU
        """Keeps the given batch rows."""
        pinned = self._device.type == "cuda"
        parts = (part[rows] for part in self._parts)
        self._parts = tuple(part.pin_memory() if pinned else part for part in parts)
        self.moved = self.moved[rows]

    def tensors(self) -> Iterator[Tensor]:
        """All that is allocated."""
        yield from (*self._parts, self.moved)

    def _reserve(self, length: int) -> None:
        have = self._parts[0].shape[2]
        if length <= have:
            return
        capacity = -(-max(length, have + have // 8) // _GROWTH) * _GROWTH
        grown = []
        for old in self._parts:
            shape = (*old.shape[:2], capacity, old.shape[3])
            new = allocate(shape, old.dtype, torch.device("cpu"), self._device.type == "cuda")
            new[:, :, :have] = old
            grown.append(new)
        self._parts = tuple(grown)


class HeldRows:
    """One layer's rows on the device: for each KV head those that its queries asked for last."""

    def __init__(self, keys: Tensor, values: Tensor) -> None:
        """No slots yet, for rows like the given ones ``[B, Hkv, *, D]``."""
        none = (*keys.shape[:2], 0)
        self.keys = allocate((*none, keys.shape[3]), keys.dtype, keys.device)
        self.values = allocate((*none, values.shape[3]), values.dtype, values.device)
        self.position = allocate(none, torch.int32, keys.device)
        """What each slot holds; -1: nothing that is read."""

    @property
    def slots(self) -> int:
        """Rows that fit, for each KV head."""
        return self.position.shape[2]

    def resize(self, slots: Tensor) -> None:  # [B], CPU
        """Changes how many rows of each batch row fit; what is in slots that go is forgotten."""
        most = int(slots.max())
        if (more := most - self.slots) > 0:
            self.keys = F.pad(self.keys, (0, 0, 0, more))
            self.values = F.pad(self.values, (0, 0, 0, more))
            self.position = F.pad(self.position, (0, more), value=-1)
        elif more < 0:
            for name in ("keys", "values", "position"):
                setattr(self, name, getattr(self, name)[:, :, :most].clone())
        beyond = torch.arange(most) >= slots[:, None, None]
        self.position.masked_fill_(beyond.to(self.position.device), -1)

    def hold(
        self,
        position: Tensor,  # [B, Hkv, n]
        there: Tensor,  # [B, Hkv, n]
        length: int,
        source: RowSource,
    ) -> Tensor:  # [B, Hkv]
        """Makes the slots hold the wanted rows, at most as many as fit, and no others.

        Only rows that are not there yet are fetched.

        Args:
            position: Of wanted rows, none twice.
            there: Which of them count.
            length: Positions that there may be.
            source: Where the rows are.

        Returns:
            How many were fetched.
        """
        # In order, so that a row takes the same slots alone and in a batch.
        position = position.where(there, length).sort(dim=2).values
        old = self.position.long()
        old = old.where(old >= 0, length)  # a place of its own, which nobody wants
        mark = there.new_zeros(*there.shape[:2], length + 1)
        mark.scatter_(2, position, position < length)
        keep = mark.gather(2, old)
        missing = mark.scatter_(2, old.where(keep, length), False).gather(2, position)
        count = missing.sum(2)
        self.position.masked_fill_(~keep, -1)
        batch, head, at = missing.nonzero(as_tuple=True)
        if not len(batch):
            return count
        hole = ~keep
        hole &= hole.cumsum(2) <= count[..., None]
        slot = hole.flatten().nonzero().squeeze(1)
        position = position[batch, head, at]
        keys, values = source.take(batch, head, position)
        self.keys.view(-1, self.keys.shape[3])[slot] = keys
        self.values.view(-1, self.values.shape[3])[slot] = values
        self.position.view(-1)[slot] = position.to(self.position.dtype)
        return count

    def select(self, rows: Tensor) -> None:
        """Keeps the given batch rows."""
        rows = rows.to(self.keys.device)
        for name in ("keys", "values", "position"):
            setattr(self, name, getattr(self, name)[rows])

    def tensors(self) -> Iterator[Tensor]:
        """All that is allocated."""
        yield from (self.keys, self.values, self.position)
