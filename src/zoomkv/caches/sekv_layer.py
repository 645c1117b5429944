"""One layer of ``sekv``: what it holds of a context, and how a query reads it."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from zoomkv.caches.base import PolicyLayer
from zoomkv.caches.context_rows import ContextRows, HeldRows
from zoomkv.caches.routing import Routing, View
from zoomkv.caches.slots import Slots
from zoomkv.caches.tiers import Traffic, make_row_codec
from zoomkv.caches.working_sets import WorkingSet
from zoomkv.modules.reader import Entries, Part, combine

_NEVER = -1e30  # finite, so that a row without a context is no NaN


class SeKVLayer(PolicyLayer):
    """One layer: exact rows (the working set), the context's rows, and what stands for them."""

    def __init__(
        self,
        number: int,
        slots: Slots,
        working_set: WorkingSet,
        make_routing: Callable[[int], Routing],
        precision: str,
        traffic: Traffic,
    ) -> None:
        super().__init__(number, slots, working_set)
        self._make_routing = make_routing
        self._precision = precision
        self._traffic = traffic
        self._forget()

    def _forget(self) -> None:
        self.routing = self._make_routing(self.number)
        self.context: ContextRows | None = None
        self.held: HeldRows | None = None
        self.entries: Entries | None = None
        self.asked = self.fetched = torch.zeros(0, 0, dtype=torch.int64)  # [B, Hkv]
        self._asked_now = self._fetched_now = self.asked  # of steps that don't count yet

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """See ``PolicyLayer``."""
        codec = make_row_codec(self._precision, key_states, value_states)
        self.context = ContextRows(key_states, value_states, codec, self._traffic)
        self.held = HeldRows(key_states, value_states)
        self.asked = self.fetched = torch.zeros(key_states.shape[:2], dtype=torch.int64)
        self._asked_now = self._fetched_now = self.asked
        super().lazy_initialization(key_states, value_states)

    def reset(self) -> None:
        """See ``PolicyLayer``."""
        super().reset()
        self._forget()

    def select(self, rows: Tensor) -> None:
        """See ``PolicyLayer``."""
        super().select(rows)
        self.routing.select(rows)
        if self.context is not None and self.held is not None:
            self.context.select(rows)
            self.held.select(rows)
            for name in ("asked", "fetched", "_asked_now", "_fetched_now"):
                setattr(self, name, getattr(self, name)[rows])
        if self.entries is not None:
            self.entries = self.entries.select(rows)

    def device_tensors(self) -> Iterator[Tensor]:
        """See ``PolicyLayer``."""
        yield from super().device_tensors()
        yield from self.routing.device_tensors()
        if self.held is not None:
            yield from self.held.tensors()
        if self.entries is not None:
            yield from self.entries.tensors()

    def host_tensors(self) -> Iterator[Tensor]:
        """See ``PolicyLayer``."""
        yield from super().host_tensors()
        yield from self.routing.host_tensors()
        yield from (self.asked, self.fetched, self._asked_now, self._fetched_now)
        if self.context is not None:
            yield from self.context.tensors()

    def count(self) -> None:
        """The step that was read for counts."""
        self.asked = self.asked + self._asked_now
        self.fetched = self.fetched + self._fetched_now
        self._asked_now = self._fetched_now = torch.zeros_like(self.asked)

    def rows(self) -> Tensor:  # [B]
        """See ``PolicyLayer``: exact rows, and the mean over KV heads of those fetched last."""
        if self.held is None:
            return super().rows()
        held = (self.held.position >= 0).sum(-1).double().mean(-1)
        return super().rows() + held.to("cpu")

    def view(self, span: Tensor, log_size: Tensor) -> View:
        """What routing may look at."""
        assert self.context is not None
        return View(span, log_size, self.entries, self.context)

    def append(
        self,
        keys: Tensor,  # fp32 [B, Hkv, S', D]
        values: Tensor,
        first: Tensor,  # [B]
        count: Tensor,  # [B]
        dtype: torch.dtype | None,
    ) -> None:
        """Adds coarse entries: ``count`` of each batch row, from its entry ``first`` on."""
        old = keys[:, :, :0], values[:, :, :0]
        if self.entries is not None:
            old = self.entries.plain()
        batch, entry = (torch.arange(keys.shape[2]) < count[:, None]).nonzero(as_tuple=True)
        at = (first[batch] + entry).to(keys.device)
        batch, entry = batch.to(keys.device), entry.to(keys.device)
        total = max(int((first + count).max()), old[0].shape[2])

        def grown(have: Tensor, new: Tensor) -> Tensor:
            have = F.pad(have, (0, 0, 0, total - have.shape[2]))
            have[batch, :, at] = new[batch, :, entry]
            return have

        self.entries = Entries.of(grown(old[0], keys), grown(old[1], values), dtype)

    def merge(self, into: Tensor, mass: Tensor, merged: Tensor) -> None:  # [B,S], [B,S], [B,S']
        """Joins coarse entries, each weighing as many tokens as it stands for."""
        assert self.entries is not None
        dtype = None if self.entries.key_scale is not None else self.entries.keys.dtype

        def joined(x: Tensor) -> Tensor:
            total = x.new_zeros(*x.shape[:2], merged.shape[1] + 1, x.shape[3])
            index = into[:, None, :, None].expand_as(x)
            total.scatter_add_(2, index, x * mass[:, None, :, None])
            return total[:, :, :-1] / merged.clamp(min=1)[:, None, :, None]

        keys, values = self.entries.plain()
        self.entries = Entries.of(joined(keys), joined(values), dtype)

    def read(
        self,
        query: Tensor,  # [B, H, Q, D]
        local: Part,
        scaling: float,
        span: Tensor,  # [B, T]
        log_size: Tensor,  # [B, S]
        slots: Tensor,  # [B], tokens that each batch row may fetch
    ) -> Tensor:  # [B, H, Q, D]
        """Attention over exact rows, the tokens that the queries look at most, coarse entries."""
        batch, heads, rows, width = query.shape
        kv_heads = local.keys.shape[1]
        scaled = (query.float() * scaling).view(batch, kv_heads, -1, rows, width)
        exact = local.logits(scaled)
        score = self.routing.scores(scaled, self.view(span, log_size))
        score = score.masked_fill((span < 0)[:, None, None, None], _NEVER)
        # Of each head's whole attention, so that heads that look elsewhere don't decide.
        within = score.log_softmax(-1)
        mass = score.amax(-1) - within.amax(-1)
        within += (mass - torch.logaddexp(exact.logsumexp(-1), mass))[..., None]
        share = within.amax(2)  # [B, Hkv, Q, T]
        most = min(int(slots.max()), share.shape[-1])
        best, token = share.topk(most, dim=-1)
        chosen = (best > _NEVER / 2) & (
            torch.arange(most, device=best.device) < slots[:, None, None, None]
        )
        # The last one is for slots that hold nothing.
        wanted = share.new_zeros(*share.shape[:-1], share.shape[-1] + 1, dtype=torch.bool)
        wanted.scatter_(-1, token, chosen)
        parts, logits = [local], [exact]
        for part in self._zoomed(wanted, span, log_size):
            parts.append(part)
            logits.append(part.logits(scaled))
        return combine(parts, logits).view(batch, heads, rows, width).to(query.dtype)

    def _zoomed(self, wanted: Tensor, span: Tensor, log_size: Tensor) -> Iterator[Part]:
        """The wanted tokens ``[B, Hkv, Q, T + 1]``, and entries of spans without any of these."""
        assert self.held is not None and self.context is not None
        if wanted.shape[2] == 1:
            fetched = self.held.hold(wanted[:, :, 0], self.context)
            # What a step that broke off has fetched, the next one need not.
            self._fetched_now = self._fetched_now + fetched.to("cpu")
            position = self.held.position.long()
            readable = (position >= 0)[:, :, None]  # [B, Hkv, 1, n]
            self._asked_now = readable.sum((2, 3)).to("cpu")
            keys, values = self.held.keys, self.held.values
        else:
            # Each query has tokens of its own: together they may be more than a step holds.
            union = wanted[..., :-1].any(2)
            count = union.sum(-1)
            position = union.to(torch.uint8).topk(int(count.max()), dim=-1).indices
            there = union.gather(-1, position)
            batch, head, at = there.nonzero(as_tuple=True)
            rows = self.context.take(batch, head, position[batch, head, at])
            keys, values = (
                like.new_zeros(*position.shape, like.shape[-1])
                for like in (self.held.keys, self.held.values)
            )
            keys[batch, head, at], values[batch, head, at] = rows
            readable = wanted.gather(-1, position[:, :, None].expand(-1, -1, wanted.shape[2], -1))
            readable = readable & there[:, :, None]
        yield Part(keys, values, readable[:, :, None])
        if self.entries is not None:
            spans = log_size.shape[1]
            of = span[:, None].expand(-1, position.shape[1], -1).gather(-1, position.clamp(min=0))
            opened = readable.new_zeros(*readable.shape[:-1], spans + 1)
            opened.scatter_(-1, of[:, :, None].where(readable, spans), True)
            bias = log_size[:, None, None].masked_fill(opened[..., :spans], -torch.inf)
            yield self.entries.part(bias[:, :, None])
