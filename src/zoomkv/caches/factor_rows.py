"""Rows of a context as products of two thin matrices, span by span (2606.31145, section 3.2).

The host keeps factors of the keys and of the values of every span and KV head, each of a rank of
its own; rows are rebuilt on the device when they are asked for.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Self

import torch
import torch.nn.functional as F
from torch import Tensor

from zoomkv.caches.tiers import Traffic, allocate
from zoomkv.modules.memory import KEYS, VALUES, Deployed, SpanMemory
from zoomkv.modules.rank_gate import RankGate
from zoomkv.ops.lowrank import rebuild
from zoomkv.ops.rope import Rotary
from zoomkv.spans.surprisal import Spans

_GROWTH = 1024  # numbers


@dataclass(frozen=True, eq=False)
class Factoriser:
    """How spans become factors; of the model, not of a sequence, so copies share it."""

    rank: int
    """Most components of a span."""
    rho: float
    """Share of the rows' storage that factors may take; no span has less than one component."""
    energy: float
    """Share of the squared singular values that stays, where there are no gates."""
    rotary: Rotary | None
    """Given, keys are factorised before RoPE, and rotated once they are rebuilt."""
    rank_gate: RankGate | None
    """Says which components stay."""

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return self

    @torch.no_grad()
    def __call__(
        self,
        keys: Tensor,  # [B, Hkv, M, D]
        values: Tensor,  # [B, Hkv, M, D]
        spans: Spans,
        position: Tensor,  # [B, M]
        coarse_keys: Tensor,  # fp32 [B, Hkv, S, D]
    ) -> Deployed:
        """Factors of all spans in fp32, without the components that are not worth their storage.

        Args:
            keys: After RoPE; zeros where there is no token.
            values: Likewise.
            spans: Of these tokens.
            position: Where the tokens stand.
            coarse_keys: Mean key of each span after RoPE, which the gates look at.
        """
        if self.rotary is not None:
            keys = self.rotary.unrotate(keys.float(), position[:, None])
        ones = torch.ones_like(spans.number, dtype=torch.float32)
        memory = SpanMemory.build(keys, values, spans, ones, self.rank, self.rho)
        assert memory.factors is not None
        sigma = memory.factors.sigma
        gates = _leading(sigma, self.energy)
        if self.rank_gate is not None:
            gates = self.rank_gate(sigma, coarse_keys)
        return memory.deploy(gates, dtype=torch.float32)


class FactorRows:
    """One layer's factors on the host. Takes the place of ``ContextRows``.

    Each batch row has one long row of numbers for keys and one for values, in which a span and
    head's V ``[D, r]`` is followed by its A ``[S, r]``.
    """

    def __init__(
        self, keys: Tensor, values: Tensor, factoriser: Factoriser, traffic: Traffic
    ) -> None:
        """Nothing yet, for rows like the given ones ``[B, Hkv, *, D]``."""
        batch, heads, _, self._width = keys.shape
        self._factoriser = factoriser
        self._traffic = traffic
        self._device = keys.device
        host = torch.device("cpu")
        self._pools = [allocate((batch, 0), x.dtype, host) for x in (keys, values)]
        self._used = torch.zeros(2, batch, dtype=torch.int64)
        self._count = torch.zeros(batch, dtype=torch.int64)  # spans
        self._span = torch.full((batch, 0), -1)  # [B, T], as they were when they joined
        self._place = torch.zeros(batch, 0, dtype=torch.int64)  # of a token in its span
        self._begin = torch.zeros(2, batch, heads, 0, dtype=torch.int64)  # [2, B, Hkv, S]
        self._rank = torch.zeros(2, batch, heads, 0, dtype=torch.int64)
        self.moved = torch.zeros(batch, dtype=torch.int64)
        """Bytes that went to the device for each batch row."""

    def put(
        self,
        spans: Spans,
        start: Tensor,  # [B], CPU
        keys: Tensor,  # [B, Hkv, M, D]
        values: Tensor,  # [B, Hkv, M, D]
        coarse_keys: Tensor,  # [B, Hkv, S, D]
    ) -> None:
        """Stores the factors of new spans.

        Args:
            spans: By the columns of ``keys``; on the device.
            start: Position of the first column.
            keys: After RoPE, zeros where there is no token.
            values: Likewise.
            coarse_keys: Mean key of each span.
        """
        if not bool(spans.count.any()):
            return  # all that joins stays whole
        position = start[:, None] + torch.arange(keys.shape[2])
        where = position.to(keys.device)
        found = self._factoriser(keys, values, spans, where, coarse_keys)
        size, rank = spans.size.to("cpu"), found.rank.to("cpu")
        length = rank * (size[:, None] + self._width)  # numbers, [2, B, Hkv, S]
        order = length.flatten(2).cumsum(-1).view_as(length) - length
        begin = order + self._used[:, :, None, None]
        pieces = torch.cat([found.v, found.a], dim=-2)  # [2, B, Hkv, S, D + longest, r]
        row = torch.arange(pieces.shape[-2], device=pieces.device)[:, None]
        column = torch.arange(pieces.shape[-1], device=pieces.device)
        inside = row < self._width + spans.size[:, None, :, None, None]
        there = inside & (column < found.rank[..., None, None])
        for kind in (KEYS, VALUES):
            self._append(kind, pieces[kind][there[kind]], length[kind].flatten(1).sum(1))
        self._note(spans, position, begin, rank)

    def take(
        self, batch: Tensor, head: Tensor, position: Tensor
    ) -> tuple[Tensor, Tensor]:  # 3 x [n] -> 2 x [n, D]
        """Rows of one head each, rebuilt on the device; all of them must be in spans.

        Moved are the V of each span and head that is asked for, and the rows of A.
        """
        return self._rows(batch.to("cpu"), head.to("cpu"), position.to("cpu"), moves=True)

    def keys(self, length: int) -> Tensor:  # [B, Hkv, length, D]
        """The first keys as they would be rebuilt, 0 in no span; not counted as traffic."""
        there = self._span[:, None, :length] >= 0
        there = there.expand(-1, self._rank.shape[2], -1)
        shape = (*there.shape[:2], length, self._width)
        out = torch.zeros(shape, dtype=self._pools[KEYS].dtype, device=self._device)
        where = there.nonzero(as_tuple=True)
        out[tuple(x.to(self._device) for x in where)] = self._rows(*where, moves=False)[KEYS]
        return out

    def select(self, rows: Tensor) -> None:  # [B'] CPU
        """Keeps the given batch rows."""
        pinned = self._device.type == "cuda"
        pools = [pool[rows] for pool in self._pools]
        self._pools = [pool.pin_memory() if pinned else pool for pool in pools]
        for name in ("_used", "_begin", "_rank"):
            setattr(self, name, getattr(self, name)[:, rows])
        for name in ("_count", "_span", "_place", "moved"):
            setattr(self, name, getattr(self, name)[rows])

    def tensors(self) -> Iterator[Tensor]:
        """All that is allocated."""
        yield from self._pools
        yield from (self._used, self._count, self._span, self._place)
        yield from (self._begin, self._rank, self.moved)

    # -- within ---------------------------------------------------------------------------------

    def _append(self, kind: int, numbers: Tensor, length: Tensor) -> None:  # [n], [B]
        """Adds numbers, in the order of batch rows, to the end of each row."""
        pool, used = self._pools[kind], self._used[kind]
        total = int((used + length).max())
        if total > pool.shape[1]:
            capacity = -(-max(total, pool.shape[1] * 9 // 8) // _GROWTH) * _GROWTH
            pinned = self._device.type == "cuda"
            grown = allocate((len(pool), capacity), pool.dtype, torch.device("cpu"), pinned)
            grown[:, : pool.shape[1]] = pool
            self._pools[kind] = pool = grown
        column = torch.arange(pool.shape[1])
        new = (column >= used[:, None]) & (column < (used + length)[:, None])
        pool[new] = numbers.to("cpu", pool.dtype)
        ahead = length.new_zeros(self._used.shape)
        ahead[kind] = length
        self._used = self._used + ahead  # in place, it may belong to inference mode
        self._traffic.to_host += numbers.numel() * pool.element_size()

    def _note(self, spans: Spans, position: Tensor, begin: Tensor, rank: Tensor) -> None:
        """Where the new spans' tokens and factors are."""
        number, size, count = (x.to("cpu") for x in (spans.number, spans.size, spans.count))
        inside = number >= 0
        first = (size.cumsum(1) - size).gather(1, number.clamp(min=0))
        place = inside.cumsum(1) - 1 - first
        batch, column = inside.nonzero(as_tuple=True)
        at = position[batch, column]
        more = max(int(at.max()) + 1 if len(at) else 0, self._span.shape[1]) - self._span.shape[1]
        self._span, self._place = (
            F.pad(self._span, (0, more), value=-1),
            F.pad(self._place, (0, more)),
        )
        self._span[batch, at] = self._count[batch] + number[batch, column]
        self._place[batch, at] = place[batch, column]
        batch, entry = (torch.arange(size.shape[1]) < count[:, None]).nonzero(as_tuple=True)
        more = max(int((self._count + count).max()) - self._rank.shape[3], 0)
        at = self._count[batch] + entry
        for name, new in (("_begin", begin), ("_rank", rank)):
            grown = F.pad(getattr(self, name), (0, more))
            grown[:, batch, :, at] = new[:, batch, :, entry]
            setattr(self, name, grown)
        self._count = self._count + count

    def _rows(
        self, batch: Tensor, head: Tensor, position: Tensor, *, moves: bool
    ) -> tuple[Tensor, Tensor]:
        heads, spans = self._rank.shape[2:]
        place = self._place[batch, position]
        wanted = (batch * heads + head) * spans + self._span[batch, position]
        # Each span and head once, and which of them each row is in.
        block, of = wanted.unique(return_inverse=True)
        longest = int(place.max()) + 1 if len(place) else 0
        there = (of.to(self._device), place.to(self._device))
        found = []
        for kind in (KEYS, VALUES):
            rank, begin = (x[kind].flatten()[block] for x in (self._rank, self._begin))
            row = block // (heads * spans)
            v = self._fetch(kind, row, begin, self._width, rank, moves)
            begin = begin[of] + (self._width + place) * rank[of]
            own = self._fetch(kind, batch, begin, 1, rank[of], moves).squeeze(1)
            a = v.new_zeros(len(block), longest, v.shape[-1])
            a[there] = own
            found.append(rebuild(a.float(), v.float())[there])
        if self._factoriser.rotary is not None:
            found[KEYS] = self._factoriser.rotary.rotate(found[KEYS], position.to(self._device))
        return found[KEYS].to(self._pools[KEYS].dtype), found[VALUES].to(self._pools[VALUES].dtype)

    def _fetch(
        self,
        kind: int,
        batch: Tensor,  # [m]
        begin: Tensor,  # [m]
        rows: int,
        rank: Tensor,  # [m]
        moves: bool,
    ) -> Tensor:  # [m, rows, R]
        """Matrices of ``rows`` by ``rank`` numbers, padded with zeros on the device."""
        pool = self._pools[kind]
        column = torch.arange(int(rank.max()) if len(rank) else 0)
        there = (column < rank[:, None, None]).expand(-1, rows, -1)
        at = (batch * pool.shape[1] + begin)[:, None, None]
        at = at + torch.arange(rows)[:, None] * rank[:, None, None] + column
        numbers = pool.flatten()[at[there]]
        if moves:
            size = rank * rows * pool.element_size()
            self.moved = self.moved.index_add(0, batch, size)
            self._traffic.to_device += int(size.sum())
        out = torch.zeros(there.shape, dtype=pool.dtype, device=self._device)
        out[there.to(self._device)] = numbers.to(self._device, non_blocking=True)
        return out


def _leading(sigma: Tensor, energy: float) -> Tensor:  # [..., R] -> fp32 [..., R]
    """1 for the fewest first components that hold a share of all squares, 0 for the others."""
    squares = sigma.double().square()
    before = squares.cumsum(-1) - squares
    share = squares.sum(-1, keepdim=True) * energy
    stays = (before < share) | (energy >= 1)
    return (stays & (sigma > 0)).float()
