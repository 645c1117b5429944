"""The queries that BeaconKV scores rows with: beacons that stand for the past, and recent ones
(arXiv 2609.04971, Continual FPS and Algorithm 2).

Queries are kept as they were rotated, with the positions that they were rotated for, and are turned
back or elsewhere only when they are compared or used: a decode step costs one write.
"""

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from zoomkv.backbone.protocol import Step
from zoomkv.caches.base import ModelShape
from zoomkv.ops.farthest_point import farthest_points
from zoomkv.ops.rope import Rotary

_PENDING = 512  # columns of a prompt in parts that are kept whole, so that parts make no difference
_NEVER = 2**31 - 1
WORKSPACE = 2**24
"""Numbers in the queries among which beacons are chosen at once; that takes fp32, several times."""


class KeptQueries:
    """What the ways to keep queries have in common. One for a cache: all layers in one tensor.

    Args:
        rotary: Of the model.
        beacons: Queries that stand for the past, for each head.
        recent: Recent queries, for each head.

    Attributes:
        length: Tokens of each batch row so far, ``[B]``, CPU.
    """

    length: Tensor
    _queries: Tensor | None  # [L, B, H, slots, D]

    def __init__(self, rotary: Rotary, beacons: int, recent: int) -> None:
        self.rotary, self.beacons, self.recent = rotary, beacons, recent
        self.start(0)

    def start(self, batch: int) -> None:
        """Begins anew with nothing."""
        self.length = torch.zeros(batch, dtype=torch.int64)
        self._queries = None

    def digest(self, step: Step, layer: int, query: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        """What ``take`` needs of a layer's queries ``[B, H, Q, D]``; changes nothing."""
        return query

    def take(self, step: Step) -> None:
        """Adds the digests of all layers, ``step.observations``."""
        raise NotImplementedError

    def prompt_ended(self, free: Tensor) -> None:  # [B]
        """A prompt has been read, and ``free`` more rows fit the budget."""

    def advance(self, free: Tensor) -> None:  # [B]
        """A decode step is about to begin, and ``free`` more rows fit the budget."""

    def evicted(self, rows: Tensor, free: Tensor) -> None:  # bool [B], [B]
        """These batch rows have dropped stored rows; now ``free`` more fit."""

    def of(self, layer: int) -> tuple[Tensor, Tensor]:  # fp32 [B, H, N, D], [B, H, N]
        """A layer's observation queries, and the position each looks from; -1: there is none."""
        raise NotImplementedError

    def aligned(self, query: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Beacons ``[B, H, N, D]`` in fp32, moved to the last token, and where they then stand."""
        now = (self.length - 1).to(positions)[:, None, None]
        moved = self.rotary.shift(query.float(), positions.clamp(min=0), now)
        return moved, now.where(positions >= 0, -1)

    def select(self, rows: Tensor) -> None:  # [B'] CPU
        """Keeps the given batch rows, in the given order; one may come twice."""
        self.length = self.length[rows]
        if self._queries is not None:
            self._queries = self._queries[:, rows.to(self._queries.device)]

    def device_tensors(self) -> Iterator[Tensor]:
        """What lies on the device."""
        if self._queries is not None:
            yield self._queries

    def host_tensors(self) -> Iterator[Tensor]:
        """What lies on the host."""
        yield self.length


class Beacons(KeptQueries):
    """Continual FPS: never more than ``beacons + recent`` queries for each head.

    Queries are collected, and cut down to the beacons whenever the buffer is full, until no more
    than ``recent`` rows fit the budget. Then the beacons are fixed, and what follows is recent. An
    eviction merges the two, and collecting goes on.

    A prompt's beacons are chosen among all its queries; where it is longer than 512 tokens and
    comes in parts, among those chosen so far and each part. If it fills the budget, its last
    queries are the recent ones.
    """

    _positions: Tensor  # int32 [L, B, H, slots], -1 in empty slots
    _filled: Tensor  # [B], slots that hold collected queries or fixed beacons
    _fixed: Tensor  # bool [B]; then what follows goes to slots from ``beacons`` on, in turn
    _since: Tensor  # [B], queries since then
    _first: Tensor  # [B], position of the first query that may become a beacon
    _pending: list[Tensor]  # [L, B, H, n, D], parts of the prompt that is being read
    _when: list[Tensor]  # [B, n], CPU, their positions; -1: padding

    def start(self, batch: int) -> None:
        """See ``KeptQueries``."""
        super().start(batch)
        self._positions = torch.zeros(0, batch, 0, 0, dtype=torch.int32)
        self._filled = torch.zeros(batch, dtype=torch.int64)
        self._since = torch.zeros(batch, dtype=torch.int64)
        self._first = torch.zeros(batch, dtype=torch.int64)
        self._fixed = torch.zeros(batch, dtype=torch.bool)
        self._pending, self._when = [], []

    def choose(
        self,
        query: Tensor,  # [..., H, N, D]
        positions: Tensor,  # [..., H, N], -1 where there is no candidate
    ) -> Tensor:  # int64 [..., H, beacons], in any order
        """Which of N >= beacons queries become beacons; -1 for each that is missing."""
        heads = max(1, WORKSPACE * query.shape[-3] // query.numel())
        chosen = []
        for some, where in zip(query.split(heads, -3), positions.split(heads, -2), strict=True):
            before_rope = self.rotary.unrotate(some.float(), where.clamp(min=0))
            chosen.append(farthest_points(before_rope, self.beacons, where >= 0))
        return torch.cat(chosen, dim=-2)

    def digest(self, step: Step, layer: int, query: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        """See ``KeptQueries``: of what is too long to wait for the prompt's end, the choice."""
        if not step.in_prompt or self._columns() + step.size <= _PENDING:
            return query
        return self._absorbed(layer, query, _positions(step))

    def take(self, step: Step) -> None:
        """See ``KeptQueries``."""
        self.length = self.length + step.added
        seen = step.observations
        if isinstance(seen[0], tuple):
            self._store(seen)
            return
        new = torch.stack(seen)  # [L, B, H, Q, D]
        if self._queries is None:
            shape = (*new.shape[:3], self.beacons + self.recent)
            self._queries = new.new_zeros(*shape, new.shape[4])
            self._positions = torch.full(shape, -1, dtype=torch.int32, device=new.device)
        if step.in_prompt:
            self._pending.append(new)
            self._when.append(_positions(step))
        else:
            self._collect(step, new)

    def prompt_ended(self, free: Tensor) -> None:  # [B]
        """See ``KeptQueries``."""
        if self._pending:
            self._store([self._absorbed(layer) for layer in range(len(self._positions))])
        self._fixed = free <= self.recent
        loose = (~self._fixed).nonzero().squeeze(1)
        self._positions[:, loose.to(self._positions.device), :, self.beacons :] = -1
        self._filled = _count(self._positions[..., : self.beacons])
        self._since = _count(self._positions[..., self.beacons :])

    def advance(self, free: Tensor) -> None:  # [B]
        """See ``KeptQueries``."""
        fix = ~self._fixed & (free <= self.recent)
        if bool(fix.any()):
            self._cut_down(fix & (self._filled > self.beacons))
            self._fixed = self._fixed | fix

    def evicted(self, rows: Tensor, free: Tensor) -> None:  # bool [B], [B]
        """See ``KeptQueries``."""
        self._cut_down(rows)
        self._fixed = self._fixed & ~rows
        self.advance(free)

    def of(self, layer: int) -> tuple[Tensor, Tensor]:  # fp32 [B, H, N, D], [B, H, N]
        """See ``KeptQueries``; for batch rows whose beacons are fixed."""
        assert self._queries is not None
        sizes = (self.beacons, self.recent)
        beacons, recent = self._queries[layer].split(sizes, dim=2)
        where, own = self._positions[layer].split(sizes, dim=2)
        moved, now = self.aligned(beacons, where)
        return torch.cat([moved, recent.float()], 2), torch.cat([now, own], 2)

    def bytes_per_row(self, shape: ModelShape, element_bytes: int) -> int:
        """Device bytes of one batch row, parts of a prompt apart."""
        slots = shape.layers * shape.heads * (self.beacons + self.recent)
        return slots * (shape.head_dim * element_bytes + self._positions.element_size())

    def select(self, rows: Tensor) -> None:  # [B'] CPU
        """See ``KeptQueries``."""
        super().select(rows)
        there = rows.to(self._positions.device)
        self._positions = self._positions[:, there]
        self._pending = [part[:, there] for part in self._pending]
        self._when = [when[rows] for when in self._when]
        self._filled, self._fixed = self._filled[rows], self._fixed[rows]
        self._since, self._first = self._since[rows], self._first[rows]

    def device_tensors(self) -> Iterator[Tensor]:
        """See ``KeptQueries``."""
        yield from super().device_tensors()
        yield from (self._positions, *self._pending)

    def host_tensors(self) -> Iterator[Tensor]:
        """See ``KeptQueries``."""
        yield from super().host_tensors()
        yield from (self._filled, self._fixed, self._since, self._first, *self._when)

    def _columns(self) -> int:
        return sum(when.shape[1] for when in self._when)

    def _absorbed(
        self, layer: int, query: Tensor | None = None, when: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:  # [B, H, slots, D], [B, H, slots]
        """A layer's buffer with the prompt so far: beacons, then the last queries by age."""
        parts = [part[layer] for part in self._pending] + ([] if query is None else [query])
        times = self._when + ([] if when is None else [when])
        batch, heads, _, width = parts[0].shape
        slots = self.beacons + self.recent
        if self._queries is None:
            held = parts[0].new_zeros(batch, heads, slots, width)
            where = torch.full(held.shape[:3], -1, dtype=torch.int32, device=held.device)
        else:
            held, where = self._queries[layer], self._positions[layer]
        new = torch.cat(times, 1).to(where)[:, None].expand(-1, heads, -1)
        held, where = torch.cat([held, *parts], 2), torch.cat([where, new], 2)
        beacons, beacon_positions = self._chosen(held, where, self._first)
        # What was a beacon before is not looked at again: it may also be among the last.
        last = where[:, :, self.beacons :].topk(self.recent, dim=-1)
        by_age = last.values.masked_fill(last.values < 0, _NEVER).argsort(dim=-1)
        index = last.indices.gather(-1, by_age) + self.beacons
        return (
            torch.cat([beacons, take(held, index)], 2),
            torch.cat([beacon_positions, where.gather(-1, index)], 2),
        )

    def _store(self, buffers: list[tuple[Tensor, Tensor]]) -> None:
        self._queries, self._positions = (torch.stack(p) for p in zip(*buffers, strict=True))
        self._pending, self._when = [], []

    def _collect(self, step: Step, new: Tensor) -> None:  # [L, B, H, 1, D]
        """Adds the queries of a decode step."""
        assert self._queries is not None
        slot = self._filled.where(~self._fixed, self.beacons + self._since % self.recent)
        real = step.added.bool()
        if step.real is None and bool((slot == slot[0]).all()):
            self._queries[:, :, :, int(slot[0])] = new[:, :, :, 0]
            self._positions[:, :, :, int(slot[0])] = step.positions.to(self._positions)
        else:
            rows = real.nonzero().squeeze(1)
            there, slot = rows.to(new.device), slot[rows].to(new.device)
            self._queries[:, there, :, slot] = new[:, :, :, 0][:, there].transpose(0, 1)
            self._positions[:, there, :, slot] = step.positions[rows, :, None].to(self._positions)
        self._filled = self._filled + (real & ~self._fixed)
        self._since = self._since + (real & self._fixed)
        self._cut_down(~self._fixed & (self._filled == self.beacons + self.recent))

    def _cut_down(self, rows: Tensor) -> None:  # bool [B]
        """Leaves only beacons in the buffers of these batch rows."""
        if not bool(rows.any()):
            return
        assert self._queries is not None
        which: slice | Tensor = slice(None)
        if not bool(rows.all()):
            which = rows.nonzero().squeeze(1).to(self._queries.device)
        together = max(1, WORKSPACE // self._queries[0].numel())
        for start in range(0, len(self._queries), together):
            layers = slice(start, start + together)
            held = self._queries[layers, which], self._positions[layers, which]
            query, positions = self._chosen(*held, self._first[rows])
            self._queries[layers, which, :, : self.beacons] = query
            self._positions[layers, which] = F.pad(positions, (0, self.recent), value=-1)
        self._filled[rows] = _count(positions)
        self._since[rows] = 0

    def _chosen(
        self,
        query: Tensor,  # [..., B, H, N, D]
        positions: Tensor,  # [..., B, H, N]
        first: Tensor,  # [B]
    ) -> tuple[Tensor, Tensor]:  # [..., B, H, beacons, D], [..., B, H, beacons]
        """The beacons among all that is there, oldest first, empty slots last."""
        if not self.beacons:
            return query[..., :0, :], positions[..., :0]
        allowed = positions.masked_fill(positions < first.to(positions)[:, None, None], -1)
        # A prompt's last queries may be beacons already.
        beacons, recent = allowed.split((self.beacons, allowed.shape[-1] - self.beacons), dim=-1)
        again = (recent[..., : self.recent, None] == beacons[..., None, :]).any(-1)
        recent[..., : self.recent].masked_fill_(again, -1)
        index = self.choose(query, allowed)
        when = positions.gather(-1, index.clamp(min=0)).masked_fill(index < 0, _NEVER)
        when, by_age = when.sort(dim=-1)
        index = index.gather(-1, by_age).clamp(min=0)
        return take(query, index), when.masked_fill(when == _NEVER, -1)


def _positions(step: Step) -> Tensor:  # [B, Q]
    if step.real is None:
        return step.positions
    return step.positions.where(step.real, -1)


def _count(positions: Tensor) -> Tensor:  # [L, B, H, n] -> [B] CPU
    """Queries that are there: as many in all layers and heads."""
    return (positions[0, :, 0] >= 0).sum(-1).to("cpu")


def take(query: Tensor, index: Tensor) -> Tensor:  # [..., N, D], [..., n] -> [..., n, D]
    """The vectors at these indices."""
    return query.gather(-2, index[..., None].expand(*index.shape, query.shape[-1]))
