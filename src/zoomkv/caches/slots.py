"""Which token stands in which slot of a layer's working set.

Stored rows stand without gaps in slots ``[0, count)``, in any order: attention doesn't care, as
keys carry their true positions. Dropping rows fills the holes from the end, so only as many rows
move as were dropped.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from zoomkv.backbone.protocol import Placement, Step

Index = tuple[Tensor | slice, ...]
"""Rows of a ``[B, Hkv, T, D]`` tensor: (batch row, head or all heads, slot)."""

_GROWTH = 64


@dataclass(slots=True)
class Moves:
    """How to turn one set of stored rows into another, in place."""

    source: Index
    """Rows to move ..."""
    target: Index
    """... into these holes; the two never overlap."""
    fetch_from: Index
    """Rows that are to come from the archive (positions for slots) ..."""
    fetch_to: Index
    """... into these holes."""
    length: int
    """Slots in use afterwards, maximum over the batch rows."""

    def on(self, device: torch.device) -> "Moves":
        """The same with the indexes on a device, so that they are copied there once."""
        return Moves(
            _index_on(self.source, device),
            _index_on(self.target, device),
            _index_on(self.fetch_from, device),
            _index_on(self.fetch_to, device),
            self.length,
        )

    def split(self, members: int) -> "list[Moves]":
        """Those of each member, where the first part of each index says whose a row is."""
        indexes = (self.source, self.target, self.fetch_from, self.fetch_to)
        source, target, fetch_from, fetch_to = (_split(index, members) for index in indexes)
        each = zip(source, target, fetch_from, fetch_to, strict=True)
        return [Moves(*parts, length=self.length) for parts in each]


class Slots:
    """Positions of the rows that one or more layers store.

    Args:
        heads: 1 if all KV heads store the same rows, else the number of KV heads.
        on_host: Keeps ``positions`` on the host even for several heads.

    Attributes:
        positions: ``[B, heads, C]``, meaningful in slots below ``count``.
        count: Rows stored, ``[B]``, CPU; the same for all heads.
        ceiling: Most slots that slack may reach; None: no limit.
    """

    positions: Tensor
    count: Tensor

    def __init__(self, heads: int = 1, on_host: bool = False) -> None:
        self.heads = heads
        self._on_host = on_host or heads == 1
        self.start(0, torch.device("cpu"))

    @property
    def on_device(self) -> bool:
        """Whether ``positions`` lives on the model's device: only an index for every head may."""
        return not self._on_host

    @property
    def bytes_per_row(self) -> int:
        """Device bytes that index one row of one head."""
        return self.positions.element_size() if self.on_device else 0

    def start(self, batch: int, device: torch.device) -> None:
        """Begins anew, with nothing stored, for a model on ``device``."""
        device = device if self.on_device else torch.device("cpu")
        self.ceiling: int | None = None
        self.count = torch.zeros(batch, dtype=torch.int64)
        self.positions = torch.zeros(batch, self.heads, 0, dtype=torch.int32, device=device)

    @property
    def length(self) -> int:
        """Slots in use, maximum over the batch rows."""
        return int(self.count.max()) if len(self.count) else 0

    def place(self, step: Step, device: torch.device) -> Placement:
        """Plans where the step's rows go; nothing changes before ``append``."""
        stored = self.length
        size, real = step.size, step.real
        if real is None and bool((self.count == stored).all()):
            length = stored + size
            mask = None
            if size > 1 and stored > 0:
                mask = torch.ones(size, length, dtype=torch.bool, device=device).tril(stored)
                mask = mask[None, None]
            return Placement(stored, length, mask=mask)
        if real is None:
            real = torch.ones_like(step.ids, dtype=torch.bool)
        batch, column = real.nonzero(as_tuple=True)
        last = self.count[:, None] + real.cumsum(1) - 1  # [B, Q], last slot that may be read
        scatter = (batch, column, last[batch, column])
        length = max(int((last + 1).max()), 1)
        # A pad in front of everything reads slot 0: garbage, but finite, and nobody looks at it.
        mask = torch.arange(length) <= last.clamp(min=0)[:, :, None]
        uniform = size == 1 and bool(mask.all())
        return Placement(
            stored,
            length,
            scatter=(
                scatter[0].to(device, non_blocking=True),
                scatter[1].to(device, non_blocking=True),
                scatter[2].to(device, non_blocking=True),
            ),
            host_scatter=scatter,
            mask=None if uniform else mask[:, None].to(device, non_blocking=True),
        )

    def append(self, step: Step, place: Placement) -> None:
        """Records the rows that the step has stored."""
        self._reserve(place.length)
        positions = step.positions.to(self.positions)
        if place.scatter is None:
            self.positions[:, :, place.stored : place.length] = positions[:, None]
        else:
            batch, column, slot = (index.to(positions.device) for index in place.scatter)
            self.positions[batch, :, slot] = positions[batch, column][:, None]
        self.count = self.count + step.added

    def valid(self) -> Tensor:  # bool [B, 1, length]
        """Slots that hold a row, on the device of ``positions``."""
        count = self.count.to(self.positions.device)
        return torch.arange(self.length, device=count.device) < count[:, None, None]

    def readable(self, total: int) -> Tensor:  # bool [B, heads, total]
        """Mask over positions: which tokens are stored."""
        stored = self.valid().expand(-1, self.heads, -1)
        batch, head, slot = stored.nonzero(as_tuple=True)
        mask = torch.zeros(*stored.shape[:2], total, dtype=torch.bool, device=stored.device)
        mask[batch, head, self.positions[batch, head, slot].long()] = True
        return mask

    def change(self, keep: Tensor) -> Moves:  # bool [B, heads, length]
        """Drops the stored rows that aren't kept.

        Each row must keep equally many slots in all heads.

        Returns:
            What the layers have to do; this index already says how it will be.
        """
        nothing = torch.zeros(0, dtype=torch.int64, device=keep.device)
        moves = exchange([self], keep[None], (nothing,) * 4)
        return Moves(
            moves.source[1:],
            moves.target[1:],
            moves.fetch_from[1:],
            moves.fetch_to[1:],
            moves.length,
        )

    def rewrite(self, positions: Tensor, count: Tensor) -> None:  # [B, heads, T], [B]
        """Says anew what stands in the first slots, and how many are in use."""
        self.positions[:, :, : positions.shape[2]] = positions
        self.count = count

    def select(self, rows: Tensor) -> None:  # [B'] CPU
        """Keeps the given batch rows, in the given order; one may come twice."""
        self.count = self.count[rows]
        self.positions = self.positions[rows.to(self.positions.device)]

    def limit(self, ceiling: int | None) -> None:
        """Bounds what slack may reach, now and when the index grows; None lifts the bound."""
        self.ceiling = ceiling
        if ceiling is not None and self.positions.shape[2] > ceiling:
            self.positions = self.positions[:, :, :ceiling].clone()

    def device_tensors(self) -> Iterator[Tensor]:
        """What lies on the device."""
        if self.on_device:
            yield self.positions

    def host_tensors(self) -> Iterator[Tensor]:
        """What lies on the host."""
        yield self.count
        if not self.on_device:
            yield self.positions

    def _reserve(self, length: int) -> None:
        capacity = self.positions.shape[2]
        if length > capacity:
            wanted = -(-length // _GROWTH) * _GROWTH
            if self.ceiling is not None:
                wanted = max(length, min(wanted, self.ceiling))
            self.positions = F.pad(self.positions, (0, wanted - capacity))


def exchange(members: Sequence[Slots], keep: Tensor, missing: tuple[Tensor, ...]) -> Moves:
    """Drops stored rows of some indexes and makes room for others, in all of them at once.

    Members store equally many rows, and so they must afterwards, in each batch row and head.

    Args:
        members: Indexes that have equally many heads.
        keep: Which slots stay, bool ``[members, B, heads, length]``; those in use are looked at.
        missing: Rows to make room for: member, batch row, head and position, each ``[n]``, in
            this order.

    Returns:
        What the layers have to do, with the member in front of each index; the indexes already
        say how it will be.
    """
    first = members[0]
    keep = keep & first.valid()
    total = keep.sum(-1)  # [members, B, heads]
    if len(missing[0]):
        total.index_put_(missing[:3], total.new_ones(1), accumulate=True)
    width = max(keep.shape[-1], int(total.max()))
    keep = F.pad(keep, (0, width - keep.shape[-1]))
    slot = torch.arange(width, device=keep.device)
    inside = slot < total[..., None]
    mover, hole = keep & ~inside, ~keep & inside
    source, holes = mover.nonzero(as_tuple=True), hole.nonzero(as_tuple=True)
    target, fetch_to = holes, missing
    if len(missing[0]):
        # Within each row the first holes take the movers, the others what is fetched.
        movers, count = mover.sum(-1).flatten(), hole.sum(-1).flatten()
        last = (count.cumsum(0) - count + movers).repeat_interleave(count)
        for_mover = torch.arange(len(last), device=last.device) < last
        target = tuple(part[for_mover] for part in holes)
        fetch_to = tuple(part[~for_mover] for part in holes)
    for slots in members:
        slots._reserve(width)
    positions = first.positions[None]
    if len(members) > 1:
        room = -(-width // _GROWTH) * _GROWTH  # what a long prompt took is given back
        positions = torch.stack([slots.positions[..., :room] for slots in members])
    positions[target] = positions[source]
    positions[fetch_to] = missing[3].to(positions)
    stored = total[0, :, 0].to("cpu")
    for slots, own in zip(members, positions, strict=True):
        slots.positions, slots.count = own, stored

    def index(parts: tuple[Tensor, ...]) -> Index:
        return (*parts[:2], slice(None), parts[3]) if first.heads == 1 else parts

    return Moves(index(source), index(target), index(missing), index(fetch_to), int(stored.max()))


def _split(index: Index, members: int) -> Iterator[Index]:
    member = index[0]
    assert isinstance(member, Tensor)
    sizes = member.bincount(minlength=members).tolist()
    parts = [
        part.split(sizes) if isinstance(part, Tensor) else [part] * members for part in index[1:]
    ]
    return zip(*parts, strict=True)


def _index_on(index: Index, device: torch.device) -> Index:
    return tuple(part.to(device) if isinstance(part, Tensor) else part for part in index)
