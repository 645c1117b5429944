"""``sekv``: a context at several resolutions, of which each query reads what it needs (2606.31145).

A context is cut into spans where it surprises. The device keeps one coarse entry for each span and
what routing needs; all rows lie on the host. In every step each KV head fetches the tokens that its
queries would look at most, as far as the budget goes, and reads them beside the newest tokens. A
span's coarse entry is read while none of its tokens is.

Faithful to SeKV: spans by surprisal, surprisal-weighted coarse keys and values with ``+log|S|``,
one softmax over all of it, anchors. Adapted: what is zoomed into are tokens, not spans, since at a
tenth of the memory a few whole spans are all that fits; a token's routing key is its own, in 4-bit
numbers (``modules/sketch.py``), since a span's mean key does not tell where a fact stands. What is
generated joins the context as soon as the local window has overflowed.

Options give the paper's own form: whole spans that a trained gate opens (``span_routing.py``),
rebuilt from low-rank factors (``factor_rows.py``), cut at every surprising token.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, Self, get_args

import torch
import torch.nn.functional as F
from torch import Tensor

from zoomkv.backbone.protocol import Step
from zoomkv.caches.base import ModelShape, PolicyCache, bookkeeping
from zoomkv.caches.budget import Budget, check_at_least
from zoomkv.caches.codecs import check_precision
from zoomkv.caches.retrieving import Residency
from zoomkv.caches.routing import TRAINING_FREE, Context, Routing, SketchRouting
from zoomkv.caches.sekv_layer import Joining, SeKVLayer
from zoomkv.caches.sekv_options import (
    check_share,
    check_threshold,
    choose_factoriser,
    choose_router,
    choose_splitter,
)
from zoomkv.caches.slots import Index, Slots
from zoomkv.caches.span_map import SpanMap
from zoomkv.caches.span_routing import SpanRouting
from zoomkv.caches.surprisal_meter import SurprisalMeter
from zoomkv.caches.tiers import Traffic
from zoomkv.caches.working_sets import DoubleBuffer, ResidentSet, StreamedSet, WorkingSet
from zoomkv.modules.reader import Part
from zoomkv.modules.router import Router
from zoomkv.modules.sketch import Sketch, check_width
from zoomkv.spans.surprisal import SINKS, Spans, span_weights

_SERIOUS = 20  # texts that are shorter than so many windows may exceed a share
_INDEX_BYTES = 4  # of a fetched row
_QUERIES = 32  # of a later prompt that read together: each has tokens of its own


class SeKVCache(PolicyCache):
    """Reads the newest tokens, the tokens that its queries look at most, and means of the rest.

    The budget bounds everything on the device, what routes included. What can't be helped is
    reported: ``overflow`` says by how many bytes the parts that must stay exceed it.

    Args:
        model: The causal LM that will use it.
        budget: Rows, or a share of full KV.
        router: A trained ``Sketch``, or a trained ``Router`` (the paper's, whole spans); by default
            the one that the model was loaded with, which ``paper`` demands to be the latter; or
            ``sketch``, which fits one to each prompt without training; or, to compare with,
            ``mean-key``, ``random``, ``closed`` and the oracles ``oracle`` and ``span-oracle``,
            which look at the host.
        threshold: One gate for all layers and heads, in place of the learnt ones of a ``Router``.
        width: Numbers that ``sketch`` keeps of a key.
        window: Newest tokens that are always read.
        slack: Tokens that are generated before those behind the window join the context; by
            default 16, or a shortest span.
        spans: How the context is cut: ``fine``, ``paper``, or ``fixed``, into even pieces of
            ``max_span`` tokens. This and the next four: by default as the router was trained.
        alpha: ``paper``: deviations above the mean at which a token is an anchor; or ``auto``,
            the least from the trained one (or 1) on with which what stays keeps within
            ``persistent_share``.
        min_span: Tokens of the shortest span.
        max_span: Tokens of the longest.
        anchor_share: ``fine``: share of the tokens that surprise most and stay whole on the device.
        persistent_share: Share of the budget for anchors, short runs and entries.
        recovery: ``exact``, or ``lowrank``: the host has factors of spans, and rows are rebuilt.
            This and the next three: by default as the router was trained.
        rope: Factorise keys after RoPE (``post``) or before it (``pre``).
        rank: Most components of a span.
        rho: Share of the rows' storage that factors may take.
        energy: Share of the squares that is kept of factors, where no router has gates for them.
        coarse_share: Share of the budget that coarse entries may take, with what routes by them;
            neighbouring spans are merged until they do. 0: there are none. By default 0.15, or
            half where whole spans are read.
        coarse_weights: Entries are means weighted by ``surprisal``, or plain ones (``mean``).
        coarse_precision: ``int8``, or ``auto``: that of the rows.
        residency: ``resident``, or ``streamed``: exact rows are on the device only in their layer's
            turn, also while a prompt is read.
        host_precision: ``auto``, ``int8`` or ``nf4``.

    Raises:
        ValueError: An option out of range, a router for another model, or another splitter than
            the router was trained with.
    """

    name = "sekv"
    spans: SpanMap
    _covered: Tensor  # [B], tokens that have joined the context, and the first ones
    overflow: Tensor  # [B], bytes by which what must stay exceeds the budget
    _slots: Tensor  # [B]
    _context: tuple[Step, Context] | None  # of the step that is read
    _told: bool  # that the budget is exceeded

    def __init__(
        self,
        model: Any,
        *,
        budget: int | float = 0.1,
        router: str | Sketch | Router | None = None,
        threshold: float | None = None,
        width: int = 16,
        window: int = 16,
        slack: int | None = None,
        spans: str | None = None,
        alpha: float | str | None = None,
        min_span: int | None = None,
        max_span: int | None = None,
        anchor_share: float | None = None,
        persistent_share: float = 0.5,
        recovery: str | None = None,
        rope: str | None = None,
        rank: int | None = None,
        rho: float | None = None,
        energy: float = 0.99,
        coarse_share: float | None = None,
        coarse_weights: str = "surprisal",
        coarse_precision: str = "int8",
        residency: str = "resident",
        host_precision: str = "auto",
    ) -> None:
        shape = ModelShape.of(model)
        for option, value, known in (
            ("coarse_precision", coarse_precision, ("int8", "auto")),
            ("coarse_weights", coarse_weights, ("surprisal", "mean")),
        ):
            if value not in known:
                raise ValueError(f"{option}={value!r}: choose {' or '.join(known)}")
        if residency not in get_args(Residency):
            raise ValueError(
                f"residency={residency!r}: choose one of {', '.join(get_args(Residency))}"
            )
        check_precision(host_precision)
        self._router = choose_router(model, router)
        self._threshold = check_threshold(self._router, threshold)
        whole = isinstance(self._router, Router)
        self._splitter = choose_splitter(
            self._router, spans, alpha, min_span, max_span, anchor_share
        )
        factoriser = choose_factoriser(model, self._router, recovery, rope, rank, rho, energy)
        if factoriser is not None and host_precision != "auto":
            raise ValueError(
                f"host_precision={host_precision!r} goes with recovery='exact': factors are kept "
                "as they are"
            )
        shortest = self._splitter.shortest
        self._window = check_at_least("window", window, 1)
        self._slack = check_at_least("slack", max(16, shortest) if slack is None else slack, 1)
        self._budget = Budget.parse(budget, SINKS + self._window + self._slack + 1)
        if self._slack < shortest:
            raise ValueError(f"slack={slack}: give at least min_span={shortest}, a span's tokens")
        if coarse_share is None:
            coarse_share = 0.5 if whole else 0.15
        self._coarse_share = check_share("coarse_share", coarse_share)
        self._persistent_share = check_share("persistent_share", persistent_share)
        self._coarse_precision, self._coarse_weights = coarse_precision, coarse_weights
        if (whole or self._router == "mean-key") and not coarse_share:
            name = "paper" if whole else "mean-key"
            raise ValueError(f"router='{name}' reads coarse entries, and coarse_share=0 has none")
        self.watches_prompt = self._router == "sketch"  # type: ignore[misc]
        if not whole:
            check_width(width, shape.head_dim)
        self._width = width
        self._meter = SurprisalMeter(model.get_output_embeddings())
        traffic, slots, every = Traffic(), Slots(), range(shape.layers)
        double = DoubleBuffer()
        sets: list[WorkingSet] = [
            StreamedSet(double, n, host_precision, traffic)
            if residency == "streamed"
            else ResidentSet()
            for n in every
        ]
        layers = [
            SeKVLayer(
                number,
                slots,
                working_set,
                self._routing,
                host_precision,
                traffic,
                factoriser,
            )
            for number, working_set in enumerate(sets)
        ]
        super().__init__(shape, layers, traffic)

    # -- turns and steps ------------------------------------------------------------------------

    @property
    def reads_itself(self) -> bool:
        """See ``PolicyCache``: as soon as there is a context."""
        return len(self.spans) > 0

    def read(
        self, step: Step, layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float
    ) -> Tensor:
        """See ``PolicyCache``."""
        mask = step.placements[layer].mask  # [B or 1, 1, Q, N]
        context = self._context_of(step)
        outputs = []
        for first in range(0, query.shape[2], _QUERIES):
            part = slice(first, first + _QUERIES)
            local = Part(key, value, None if mask is None else mask[:, :, None, part])
            own = self.layers[layer].read(query[:, :, part], local, scaling, context)
            outputs.append(own)
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=2)

    def readable(self, layer: int) -> Tensor:
        """See ``PolicyCache``: exact rows, and what was fetched last."""
        total = int(self._lengths.max()) if len(self._lengths) else 0
        exact = self.slots.readable(total).expand(-1, self.shape.kv_heads, -1).clone()
        held = self.layers[layer].held
        if held is not None:
            batch, head, slot = (held.position >= 0).nonzero(as_tuple=True)
            exact[batch, head, held.position[batch, head, slot].long()] = True
        return exact

    def coarse(self, layer: int) -> Tensor:  # bool [B, Hkv, longest row]
        """Which positions the last query read in a span's coarse entry: none of its tokens was
        fetched, so none of these positions is ``readable``."""
        total, own = int(self._lengths.max()) if len(self._lengths) else 0, self.layers[layer]
        batch, heads = len(self._lengths), self.shape.kv_heads
        if own.entries is None or own.held is None:
            return torch.zeros(batch, heads, total, dtype=torch.bool, device=self._device)
        span = F.pad(self.spans.of, (0, total - len(self.spans)), value=-1)
        span = span[:, None].expand(-1, heads, -1)
        held = own.held.position.long()
        of = span.gather(2, held.clamp(min=0)).where(held >= 0, self.spans.log_size.shape[1])
        opened = torch.zeros(
            batch, heads, self.spans.log_size.shape[1] + 1, dtype=torch.bool, device=span.device
        )
        opened.scatter_(2, of, True)
        return (span >= 0) & ~opened.gather(2, span.clamp(min=0))

    def watch(self, step: Step, layer: int, query: Tensor, key: Tensor) -> Tensor | None:
        """See ``PolicyCache``: second moments of the queries ``[B, Hkv, D, D]``."""
        if not bool((self._covered == SINKS).any()):
            return None
        query = query.float().unflatten(1, (self.shape.kv_heads, -1))
        if step.real is not None:
            query = query * step.real.to(query.device)[:, None, None, :, None]
        query = query.flatten(2, 3)
        return query.mT @ query

    def watched(self, step: Step) -> None:
        """See ``PolicyCache``."""
        new = (self._covered == SINKS).to(self._device)[:, None, None, None]
        for layer, moments in zip(self.layers, step.observations, strict=True):
            if moments is not None:
                layer.routing.observe(moments * new)

    @bookkeeping
    def commit(self, step: Step, hidden: Tensor) -> None:
        """See ``SteppedCache``: notes how little each token was expected."""
        self._meter.note(step, hidden)
        super().commit(step, hidden)
        self._context = None
        for layer in self.layers:
            layer.tally.commit()

    def prompt_started(self, first: bool) -> None:
        """See ``PolicyCache``: until the prompt is read, nothing is bounded."""
        self.slots.limit(None)
        for layer in self.layers:
            layer.working_set.limit(None)

    def prompt_read(self, added: Tensor) -> None:
        """See ``PolicyCache``."""
        self._meter.settle()  # the last tokens may have come one by one
        self._join(torch.ones_like(added, dtype=torch.bool))

    def prepare(self, step: Step) -> None:
        """See ``PolicyCache``: the window overflows."""
        beyond = self._lengths - self._covered - self._window
        due = beyond >= self._slack
        if bool(due.any()):
            self._meter.settle()  # what fails here can be tried again
            with self.moving():
                self._join(due)

    def trace(self) -> list[dict[str, Any]]:
        """For each batch row and layer, what its queries did one by one since the start.

        ``asked`` are the tokens of each KV head, ``fetched`` those that the device did not have.
        Where whole spans are read, also: how many spans were ``offered``; of these, by query head,
        how many ``passed`` the threshold, and how many were ``zoomed``, as there was room;
        ``zoom_rate``, zoomed over offered; ``hit_rate``, by KV head, the share of asked tokens that
        were there; ``bytes`` that were moved to the device.
        """
        return [
            {"row": row, "column": self._seen, "layer": layer.number, **layer.told(row)}
            for row in range(len(self._lengths))
            for layer in self.layers
        ]

    @property
    def slots(self) -> Slots:
        """Of the exact rows, which all layers and heads share."""
        return self.groups[0][0]

    # -- within ---------------------------------------------------------------------------------

    def _context_of(self, step: Step) -> Context:
        if self._context is None or self._context[0] is not step:
            slots = self._slots
            if step.real is not None and step.size == 1:
                slots = slots.where(step.real[:, 0], -1)  # a row that has ended asks for nothing
            self._context = step, Context(self.spans.of, self.spans.log_size, slots)
        return self._context[1]

    def _routing(self, layer: int) -> Routing:
        if isinstance(self._router, str) and self._router != "sketch":
            return TRAINING_FREE[self._router](layer)
        if isinstance(self._router, Router):
            return SpanRouting(layer, self._router, self._threshold)
        trained = None if isinstance(self._router, str) else self._router
        return SketchRouting(layer, self._width, trained)

    def _join(self, due: Tensor) -> None:  # bool [B]
        """What lies behind the window joins the context; its exact rows leave the device."""
        start = self._covered
        size = self._lengths - self._window - start
        size = size.where(due & (size >= self._splitter.shortest), 0)  # less is no span
        if bool((size > 0).any()):
            column = torch.arange(int(size.max()))
            present = column < size[:, None]
            at = (start[:, None] + column).clamp(max=self._meter.nats.shape[1] - 1)
            nats = self._meter.nats.gather(1, at).where(present, 0)
            spans = self._cut(nats, size)
            before = self.spans.count
            self.spans.add(spans, start, present)
            self._extend(spans, nats, start, present, before)
            self._covered = start + size
            self._merge()
            for layer in self.layers:
                if layer.entries is not None:
                    layer.routing.summarise(layer.entries, self._rows_dtype())
            self._leave()
        self._bound(due)

    def _cut(self, nats: Tensor, size: Tensor) -> Spans:
        """The spans of what joins; none where nothing does."""
        rows, coarse = None, 1.0
        if self._splitter.auto:
            coarse = (self._entry_bytes() + self._summary_bytes()) / self._row_bytes()
            whole = self._covered - SINKS - self.spans.inside()
            rows = (
                self._rows().double() * self._persistent_share - whole - coarse * self.spans.count
            )
        # A row to which nothing is added still wants a token to cut.
        spans = self._splitter.cut(nats, size.clamp(min=1), rows, coarse)
        there = size > 0
        return replace(
            spans,
            number=spans.number.where(there[:, None], -1),
            size=spans.size.where(there[:, None], 0),
            count=spans.count.where(there, 0),
        )

    def _extend(
        self, spans: Spans, nats: Tensor, start: Tensor, present: Tensor, before: Tensor
    ) -> None:
        """Every layer takes the new tokens from its working set; spans go on from ``before``."""
        batch, column = present.nonzero(as_tuple=True)
        position = start[batch] + column
        source = self._where(batch, position)
        device = self._device
        if self._coarse_weights == "mean":
            nats = torch.zeros_like(nats)
        joining = Joining(
            batch=batch,
            column=column,
            position=position,
            present=present.to(device),
            start=start,
            spans=replace(
                spans,
                number=spans.number.to(device),
                size=spans.size.to(device),
                count=spans.count.to(device),
            ),
            weights=span_weights(nats, spans).to(device),
            first=((start == SINKS) & present.any(1)).to(device),
            entry=before,
            count=spans.count,
        )
        for layer in self.layers:
            rows, dtype = layer.working_set.take(source), self._coarse_dtype()
            layer.extend(joining, rows, dtype, bool(self._coarse_share))

    def _where(self, batch: Tensor, position: Tensor) -> Index:  # 2 x [n]
        """Where exact rows are in the working sets, for all heads."""
        stored = self.slots.positions[:, 0, : self.slots.length].long()
        valid = self.slots.valid()[:, 0]
        slot_of = torch.zeros(len(stored), int(self._lengths.max()) + 1, dtype=torch.int64)
        slot_of.scatter_(
            1,
            stored.where(valid, slot_of.shape[1] - 1),
            torch.arange(stored.shape[1]).expand_as(stored),
        )
        on = self._device if isinstance(self.layers[0].working_set, ResidentSet) else "cpu"
        return batch.to(on), slice(None), slot_of[batch, position].to(on)

    def _merge(self) -> None:
        """Neighbouring spans become one, until the entries take no more than their share."""
        if not self._coarse_share:
            return
        allowed = self._entries_allowed()
        while bool((over := (self.spans.count - allowed).clamp(min=0)).any()):
            where = self.spans.pair(over.minimum(self.spans.count // 2))
            for layer in self.layers:
                layer.merge(*where)

    def _entries_allowed(self) -> Tensor:  # [B]
        """How many coarse entries each batch row may have; a row's own affair, like its budget."""
        most = -(-self._covered // self._splitter.shortest)
        if not self._coarse_share:
            return most
        rows = self._rows().double() * self._coarse_share
        of_entry = self._entry_bytes() + self._summary_bytes()
        allowed = (rows * self._row_bytes() / of_entry).long()
        if self._splitter.scheme != "fine":  # what stays whole may leave less
            everywhere = self.shape.layers * self.shape.kv_heads
            room = self._rows().double() * self._row_bytes() * everywhere
            room = room - self._fixed_bytes(torch.zeros_like(most))
            allowed = allowed.minimum((room / (of_entry * everywhere + 4)).floor().long())
        return allowed.clamp(min=1).minimum(most)

    def _entry_bytes(self) -> int:
        """Of one coarse entry of one KV head."""
        if self._coarse_precision == "auto":
            return self._row_bytes()
        return 2 * (self.shape.head_dim + 4)

    def _summary_bytes(self) -> int:
        """Of what routing keeps of one coarse entry of one KV head."""
        return self.layers[0].routing.bytes_per_entry(self._rows_dtype())

    def _leave(self) -> None:
        """Rows that have joined and are in a span leave the working sets."""
        positions = self.slots.positions[..., : self.slots.length].long()  # [B, 1, N]
        span = F.pad(self.spans.of.to("cpu"), (0, 1), value=-1)  # [B, T + 1]
        at = positions[:, 0].clamp(max=span.shape[1] - 1)
        keep = span.gather(1, at)[:, None] < 0
        moves = self.slots.change(keep)
        on = self._device if isinstance(self.layers[0].working_set, ResidentSet) else "cpu"
        there = moves.on(torch.device(on))
        for layer in self.layers:
            layer.working_set.move(there.source, there.target)
            layer.working_set.fit(moves.length)

    def _bound(self, due: Tensor) -> None:  # bool [B]
        """How many tokens each batch row may fetch, once all else has its place."""
        unit, everywhere = self._row_bytes(), self.shape.layers * self.shape.kv_heads
        entries = self._entries_allowed()
        if self._splitter.scheme != "fine":  # there may be far fewer
            entries = entries.minimum(self.spans.count.clamp(min=1))
        room = self._rows().double() * unit * everywhere - self._fixed_bytes(entries)
        self.overflow = torch.where(due, (-room).clamp(min=0).long(), self.overflow)
        slots = (room / ((unit + _INDEX_BYTES) * everywhere)).floor().long().clamp(min=0)
        inside, exact = self.spans.inside(), self._exact()
        self._slots = torch.where(due, slots.minimum(inside), self._slots)
        self._tell_overflow(exact)
        ceiling = max(int(exact.max()), self.slots.length)
        self.slots.limit(ceiling)
        for layer in self.layers:
            layer.working_set.limit(ceiling)
            if layer.held is not None:
                layer.held.resize(self._slots)

    def _exact(self) -> Tensor:  # [B]
        """Exact rows of each batch row at most, until its next tokens join."""
        inside = self.spans.inside()
        return self._covered - inside + self._window + self._slack

    def _fixed_bytes(self, entries: Tensor) -> Tensor:  # [B] -> [B]
        """Of all but fetched rows, where each batch row has so many coarse entries."""
        layer, everywhere = self.layers[0], self.shape.layers * self.shape.kv_heads
        streamed = isinstance(layer.working_set, StreamedSet)
        of_rows = 2 * self.shape.kv_heads if streamed else everywhere
        fixed = self._exact() * self._row_bytes() * of_rows
        fixed = fixed + self._meter.state_bytes() * (self._slack + 1)
        if len(self.spans):
            per_head = layer.routing.fixed_bytes() + layer.routing.bytes_per_token() * self._covered
            if self._coarse_share:
                of_entry = self._entry_bytes() + self._summary_bytes()
                per_head = per_head + entries * of_entry
            fixed = fixed + per_head * everywhere + 8 * self._covered
            fixed = fixed + 4 * entries  # their sizes
        return fixed

    def _tell_overflow(self, exact: Tensor) -> None:  # [B]
        """Says once that the budget can't be kept; of a share, not before it comes to something."""
        serious = self.overflow > 0
        if isinstance(self._budget.value, float):
            serious = serious & (self._lengths > _SERIOUS * exact)
        if self._told or not len(self.spans) or not bool(serious.any()):
            return
        self._told = True
        unit = self._row_bytes() * self.shape.layers * self.shape.kv_heads
        warnings.warn(
            f"sekv: what must stay on the device exceeds the budget by "
            f"{int(self.overflow.max())} bytes ({-(-int(self.overflow.max()) // unit)} rows); "
            "raise budget, or lower window and slack",
            stacklevel=2,
        )

    def _rows(self) -> Tensor:  # [B]
        """What the budget allows. Buffers change when tokens join, so a share may be exact."""
        return self._budget.rows(self._lengths, step=1)

    def _row_bytes(self) -> int:
        """Of K and V of one token of one KV head."""
        held = self.layers[0].held
        if held is None:
            return 1
        return sum(x.shape[3] * x.element_size() for x in (held.keys, held.values))

    def _rows_dtype(self) -> torch.dtype:
        assert self.layers[0].held is not None
        return self.layers[0].held.keys.dtype

    def _coarse_dtype(self) -> torch.dtype | None:
        return None if self._coarse_precision == "int8" else self._rows_dtype()

    # -- state ----------------------------------------------------------------------------------

    def select(self, rows: Tensor) -> None:
        """See ``PolicyCache``."""
        super().select(rows)
        self.spans.select(rows)
        for name in ("_covered", "_slots", "overflow"):
            setattr(self, name, getattr(self, name)[rows])
        self._meter.select(rows)

    def device_tensors(self) -> Iterator[Tensor]:
        """See ``PolicyCache``."""
        yield from super().device_tensors()
        yield from self.spans.device_tensors()
        yield from self._meter.device_tensors()

    def host_tensors(self) -> Iterator[Tensor]:
        """See ``PolicyCache``."""
        yield from super().host_tensors()
        yield from self._meter.host_tensors()
        yield from (self._covered, self.spans.count, self._slots, self.overflow)

    def _start(self, batch: int, device: torch.device) -> None:
        super()._start(batch, device)
        self.spans = SpanMap(batch, device)
        self._covered = torch.full((batch,), SINKS)
        self._slots, self.overflow = (torch.zeros(batch, dtype=torch.int64) for _ in range(2))
        self._meter.start(batch)
        self._told = False
        self._context = None

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        # Of the model, not of a sequence: shared.
        memo[id(self._router)] = self._router
        return super().__deepcopy__(memo)
