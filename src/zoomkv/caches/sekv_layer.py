"""One layer of ``sekv``: what it holds of a context, and how a query reads it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from zoomkv.caches.base import PolicyLayer
from zoomkv.caches.context_rows import ContextRows, HeldRows
from zoomkv.caches.factor_rows import Factoriser, FactorRows
from zoomkv.caches.routing import Choice, Context, Routing, View
from zoomkv.caches.slots import Slots
from zoomkv.caches.tally import Tally
from zoomkv.caches.tiers import Traffic, make_row_codec
from zoomkv.caches.working_sets import WorkingSet
from zoomkv.modules.reader import Entries, Part, read
from zoomkv.spans.surprisal import Spans, span_sums


@dataclass(slots=True)
class Joining:
    """Tokens that join the context, the same for all layers."""

    batch: Tensor
    """Of each token, CPU ``[n]``."""
    column: Tensor
    """Where it is among those of its batch row, CPU ``[n]``."""
    position: Tensor
    """CPU ``[n]``."""
    present: Tensor
    """Which columns there are, bool ``[B, M]``, on the device."""
    start: Tensor
    """Position of the first column, CPU ``[B]``."""
    spans: Spans
    """By column, on the device."""
    weights: Tensor
    """What each token counts for in its span, fp32 ``[B, M]``, on the device."""
    first: Tensor
    """Batch rows that had no context until now, bool ``[B]``, on the device."""
    entry: Tensor
    """Which entry the first new span gets, CPU ``[B]``."""
    count: Tensor
    """New spans, CPU ``[B]``."""


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
        factoriser: Factoriser | None = None,
    ) -> None:
        super().__init__(number, slots, working_set)
        self._make_routing = make_routing
        self._precision = precision
        self._traffic = traffic
        self._factoriser = factoriser
        self._forget()

    def _forget(self) -> None:
        self.routing = self._make_routing(self.number)
        self.context: ContextRows | FactorRows | None = None
        self.held: HeldRows | None = None
        self.entries: Entries | None = None
        self.tally = Tally()

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """See ``PolicyLayer``."""
        if self._factoriser is not None:
            like = key_states, value_states
            self.context = FactorRows(*like, self._factoriser, self._traffic)
        else:
            codec = make_row_codec(self._precision, key_states, value_states)
            self.context = ContextRows(key_states, value_states, codec, self._traffic)
        self.held = HeldRows(key_states, value_states)
        for name in ("asked", "fetched"):
            self.tally.start(name, torch.zeros(key_states.shape[:2], dtype=torch.int64))
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
            self.tally.select(rows)
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
        yield from self.tally.tensors()
        if self.context is not None:
            yield from self.context.tensors()

    def told(self, row: int) -> dict[str, Any]:
        """What the trace tells of a batch row."""
        told: dict[str, Any] = {
            name: self.tally.of(name)[row].tolist() for name in self.tally.names()
        }
        if self.context is not None and "offered" in told:
            told["offered"] = offered = told["offered"][0]
            told["zoom_rate"] = [zoomed / max(offered, 1) for zoomed in told["zoomed"]]
            told["hit_rate"] = [
                1 - fetched / asked if asked else None
                for fetched, asked in zip(told["fetched"], told["asked"], strict=True)
            ]
            told["bytes"] = int(self.context.moved[row])
        return told

    def rows(self) -> Tensor:  # [B]
        """See ``PolicyLayer``: exact rows, and the mean over KV heads of those fetched last."""
        if self.held is None:
            return super().rows()
        held = (self.held.position >= 0).sum(-1).double().mean(-1)
        return super().rows() + held.to("cpu")

    def extend(
        self, joining: Joining, rows: tuple[Tensor, Tensor], dtype: torch.dtype | None, coarse: bool
    ) -> None:
        """Takes rows ``[n, Hkv, D]`` of new tokens.

        Args:
            joining: What they are.
            rows: Their keys and values, on the device.
            dtype: Of coarse entries; None: 8 bits.
            coarse: Whether there are such entries.

        Raises:
            ValueError: Rows that are not finite.
        """
        for what, x in zip(("keys", "values"), rows, strict=True):
            if not bool(x.isfinite().all()):
                raise ValueError(f"layer {self.number}: {what} are not finite")
        device = rows[0].device
        batch, column = joining.batch.to(device), joining.column.to(device)
        batches, columns = joining.present.shape
        keys, values = (x.new_zeros(batches, x.shape[1], columns, x.shape[2]) for x in rows)
        keys[batch, :, column], values[batch, :, column] = rows
        spans, weights = joining.spans, joining.weights
        if isinstance(self.context, FactorRows):
            coarse_keys = span_sums(keys, weights, spans)
            self.context.put(spans, joining.start, keys, values, coarse_keys)
        elif self.context is not None:
            self.context.put(joining.batch, joining.position, *rows)
        self.routing.extend(keys, joining.start, joining.present, joining.first)
        if coarse:
            means = span_sums(keys, weights, spans), span_sums(values, weights, spans)
            self.append(*means, joining.entry, joining.count, dtype)

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
        total = max(int((first + count).max()), old[0].shape[2], 1)

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
        context: Context,
    ) -> Tensor:  # [B, H, Q, D]
        """Attention over exact rows, the tokens that the queries look at most, coarse entries."""
        assert self.context is not None
        grouped = query.unflatten(1, (local.keys.shape[1], -1))
        scaled = grouped.float() * scaling
        view = View(context, self.entries, self.context)
        choice = self.routing.choose(query, scaled, local.logits(scaled), view)
        parts = [local, *self._zoomed(choice, context)]
        return read(grouped, parts, scaling).flatten(1, 2)

    def _zoomed(self, choice: Choice, context: Context) -> Iterator[Part]:
        """The chosen tokens, and the entries of spans that are read as such."""
        assert self.held is not None and self.context is not None
        opened = choice.opened
        if choice.position.shape[2] == 1:
            wanted, there = choice.position[:, :, 0], choice.there[:, :, 0]
            fetched = self.held.hold(wanted, there, context.span.shape[1], self.context)
            # What a step that broke off has fetched, the next one need not.
            self.tally.note("fetched", fetched, again=True)
            self.tally.note("asked", there.sum(2))
            for name, count in choice.counts.items():
                self.tally.note(name, count)
            keys, values = self.held.keys, self.held.values
            position = self.held.position.long()  # [B, Hkv, n]
            readable = (position >= 0)[:, :, None]  # [B, Hkv, 1, n]
        else:
            keys, values, position, readable = self._union(choice, context)
        mask = readable[:, :, None]  # [B, Hkv, 1, Q, n]
        if self.entries is None:
            yield Part(keys, values, mask)
            return
        spans = context.log_size.shape[1]
        span = context.span[:, None].expand(-1, position.shape[1], -1)
        of = span.gather(-1, position.clamp(min=0))
        if opened is None:
            bias = F.pad(context.log_size, (0, 1))[:, None, None].repeat(1, *readable.shape[1:3], 1)
            bias.scatter_(-1, of[:, :, None].where(readable, spans), -torch.inf)
            bias = bias[:, :, None, :, :spans]
        else:
            bias = context.log_size[:, None, None, None].masked_fill(opened, -torch.inf)
            own = of.clamp(min=0)[:, :, None, None].expand(*opened.shape[:-1], -1)
            mask = mask & opened.gather(-1, own)
        yield Part(keys, values, mask)
        yield self.entries.part(bias)

    def _union(self, choice: Choice, context: Context) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """What queries that read together want, each tokens of its own, fetched for this once.

        Together they may be more than a step holds.

        Returns:
            Keys and values ``[B, Hkv, n, D]``, positions ``[B, Hkv, n]``, which of them each query
            reads ``[B, Hkv, Q, n]``.
        """
        assert self.held is not None and self.context is not None
        total = context.span.shape[1]
        wanted = choice.there.new_zeros(*choice.there.shape[:-1], total + 1)
        wanted.scatter_(-1, choice.position.where(choice.there, total), True)
        union = wanted[..., :total].any(2)
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
        return keys, values, position, readable & there[:, :, None]
