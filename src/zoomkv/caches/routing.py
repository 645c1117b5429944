"""How a query finds what it should read of a context, layer by layer.

A routing gives each query about what its logit with each token is; the budget takes the best.
``sketch`` keeps a few 4-bit numbers of every key. The others are what it is measured against. The
paper's way, whole spans by a trained gate, is in ``span_routing.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor

from zoomkv.caches.context_rows import RowSource
from zoomkv.modules.reader import Entries
from zoomkv.modules.sketch import Codes, Projections, Sketch, encode, fit, image_of, logits

_NEVER = -1e30  # finite, so that a row without a context is no NaN


class Context:
    """The spans that a step's queries may look into, the same for all layers.

    Args:
        span: The span of each token, -1 where it is in none, int64 ``[B, T]``.
        log_size: Tokens of each span, fp32 ``[B, S]``; -inf where there is none.
        slots: Tokens that each KV head of a batch row may have; below 0, it asks for nothing. On
            the host ``[B]``.
    """

    def __init__(self, span: Tensor, log_size: Tensor, slots: Tensor) -> None:
        self.span, self.log_size = span, log_size
        self.slots = slots.to(span.device)
        self.most = max(min(int(slots.max()), span.shape[1]), 0)
        """Tokens that any KV head may have."""
        self.outside = span.new_zeros(span.shape, dtype=torch.float32)
        """Added to scores: tokens in no span are not asked for, fp32 ``[B, T]``."""
        self.outside.masked_fill_(span < 0, _NEVER)


@dataclass(slots=True)
class View:
    """What a routing may look at: a layer's context as it is now."""

    context: Context
    entries: Entries | None
    """Coarse keys and values."""
    rows: RowSource
    """All rows, on the host."""


@dataclass(slots=True)
class Choice:
    """What queries read of a context."""

    position: Tensor
    """Tokens that a KV head's queries read, none twice, int64 ``[B, Hkv, Q, n]``."""
    there: Tensor
    """Which of them count, bool ``[B, Hkv, Q, n]``."""
    opened: Tensor | None = None
    """Spans whose tokens a query head reads in place of their entry, bool ``[B, Hkv, G, Q, S]``;
    None: all heads read the tokens, and entries of spans without any of these."""
    counts: dict[str, Tensor] = field(default_factory=dict)
    """What the trace tells, ``[B, *]``."""


class Routing:
    """Base: one object for each layer."""

    def __init__(self, layer: int) -> None:
        self.layer = layer

    def observe(self, moments: Tensor) -> None:  # [B, Hkv, D, D]
        """Second moments of the queries that have read the prompt."""

    def extend(self, keys: Tensor, start: Tensor, present: Tensor, first: Tensor) -> None:
        """Tokens join the context.

        Args:
            keys: ``[B, Hkv, M, D]``.
            start: Position of the first of them in each batch row ``[B]``.
            present: Which there are, bool ``[B, M]``.
            first: Batch rows that had no context until now, bool ``[B]``.
        """

    def summarise(self, entries: Entries, dtype: torch.dtype) -> None:
        """Coarse entries have changed; what is kept of them has the dtype of rows."""

    def choose(
        self,
        query: Tensor,  # [B, H, Q, D]
        scaled: Tensor,  # [B, Hkv, G, Q, D]
        exact: Tensor,  # [B, Hkv, G, Q, N]
        view: View,
    ) -> Choice:
        """What each query reads, each as if it were alone: here the tokens that score best.

        Args:
            query: As they are.
            scaled: The same, scaled.
            exact: Their logits with exact rows.
            view: The context.
        """
        context = view.context
        # Of each head's whole attention, so that heads that look elsewhere don't decide.
        whole = torch.cat([exact, self.scores(scaled, view)], dim=-1).log_softmax(-1)
        share = whole[..., exact.shape[-1] :].amax(2)  # [B, Hkv, Q, T]
        alone = len(share) == 1  # else batch rows with fewer slots want their best first
        best, token = share.topk(context.most, dim=-1, sorted=not alone)
        there = best > _NEVER / 2
        if not alone:
            count = torch.arange(context.most, device=best.device)
            there &= count < context.slots[:, None, None, None]
        return Choice(token, there)

    def scores(self, query: Tensor, view: View) -> Tensor:  # [B,Hkv,G,Q,D] -> [B,Hkv,G,Q,T]
        """About the logits of scaled queries with each token; of one in no span, hopelessly low."""
        raise NotImplementedError

    def bytes_per_entry(self, dtype: torch.dtype) -> int:
        """Device bytes for each coarse entry and KV head, where rows are of a dtype."""
        return 0

    def bytes_per_token(self) -> float:
        """Device bytes for each token and KV head."""
        return 0.0

    def fixed_bytes(self) -> int:
        """Device bytes for each batch row and KV head, however many tokens there are."""
        return 0

    def select(self, rows: Tensor) -> None:
        """Keeps the given batch rows."""

    def device_tensors(self) -> Iterator[Tensor]:
        """What lies on the device."""
        yield from ()

    def host_tensors(self) -> Iterator[Tensor]:
        """What lies on the host."""
        yield from ()


class SketchRouting(Routing):
    """Codes of all keys: under a trained sketch, or one that is fitted to each prompt.

    Without training, keys are projected so that the prompt's own queries, asking for any of its
    keys, would be misled least.
    """

    def __init__(self, layer: int, width: int, trained: Sketch | None) -> None:
        super().__init__(layer)
        self._width = width if trained is None else trained.width
        self._trained = trained
        self._moments: Tensor | None = None  # [B, Hkv, D, D], host, until all rows have maps
        self._fitted: Tensor | None = None  # bool [B], host
        self._own: Projections | None = None  # query [B, Hkv, D, W] on the device, key on the host
        self._codes: Codes | None = None

    def observe(self, moments: Tensor) -> None:
        """See ``Routing``."""
        if self._trained is None:
            moments = moments.to("cpu")
            self._moments = moments if self._moments is None else self._moments + moments

    def extend(self, keys: Tensor, start: Tensor, present: Tensor, first: Tensor) -> None:
        """See ``Routing``."""
        projection = self._key_projection(keys, present, first)
        old = like = self._codes
        if old is not None and bool(first.any()):
            # Who has codes already goes on with their levels.
            own = encode(keys, projection, present)
            step = torch.where(first[:, None, None], own.step, old.step)
            mean = torch.where(first[:, None, None], own.mean, old.mean)
            like = Codes(old.packed, step, mean)
        new = encode(keys, projection, present, like)
        packed = new.packed[..., :0] if old is None else old.packed
        end = int((start + present.sum(1).to("cpu")).max())
        packed = F.pad(packed, (0, max(end - packed.shape[3], 0)))
        batch, column = present.nonzero(as_tuple=True)
        position = start.to(packed.device)[batch] + column
        packed[batch, :, :, position] = new.packed[batch, :, :, column]
        self._codes = Codes(packed, new.step, new.mean)

    def scores(self, query: Tensor, view: View) -> Tensor:
        """See ``Routing``."""
        assert self._codes is not None
        if self._trained is not None:
            projection = self._trained.of(self.layer).query[None].to(query.device)
        else:
            assert self._own is not None
            projection = self._own.query[:, :, None]
        image = image_of(query, projection)
        return logits(query, image, self._codes, view.context.outside)

    def bytes_per_token(self) -> float:
        """See ``Routing``."""
        return self._width / 2

    def fixed_bytes(self) -> int:
        """See ``Routing``."""
        assert self._codes is not None
        parts = [self._codes.step, self._codes.mean]
        if self._own is not None:
            parts.append(self._own.query)
        return sum(x[0, 0].numel() * x.element_size() for x in parts)

    def select(self, rows: Tensor) -> None:
        """See ``Routing``."""
        if self._moments is not None:
            self._moments = self._moments[rows]
        if self._fitted is not None:
            self._fitted = self._fitted[rows]
        if self._codes is not None:
            self._codes = self._codes.select(rows)
        if self._own is not None:
            query, key = self._own
            self._own = Projections(query[rows.to(query.device)], key[rows])

    def device_tensors(self) -> Iterator[Tensor]:
        """See ``Routing``."""
        if self._codes is not None:
            yield from self._codes.tensors()
        if self._own is not None:
            yield self._own.query

    def host_tensors(self) -> Iterator[Tensor]:
        """See ``Routing``."""
        if self._own is not None:
            yield self._own.key
        yield from (x for x in (self._moments, self._fitted) if x is not None)

    def _key_projection(self, keys: Tensor, present: Tensor, first: Tensor) -> Tensor:
        if self._trained is not None:
            return self._trained.of(self.layer).key.to(keys.device)
        if self._moments is not None and bool(first.any()):
            if not bool(self._moments.isfinite().all()):
                raise ValueError(f"layer {self.layer}: queries are not finite")
            asked = self._moments.to(keys.device)
            found = fit(_moments(keys, present), asked, self._width)
            query, key = found.query.to(keys.dtype), found.key.to("cpu")
            first = first.to("cpu")
            if self._own is not None and self._fitted is not None:
                query = query.where(first[:, None, None, None].to(query.device), self._own.query)
                key = key.where(first[:, None, None, None], self._own.key)
                first = first | self._fitted
            self._own, self._fitted = Projections(query, key), first
            if bool(first.all()):
                self._moments = None
        assert self._own is not None
        return self._own.key.to(keys.device)


class MeanKeyRouting(Routing):
    """A token's score is that of its span: the mean key's logit (training-free SeKV)."""

    def scores(self, query: Tensor, view: View) -> Tensor:
        """See ``Routing``."""
        assert view.entries is not None
        keys, _ = view.entries.plain()
        score = query @ keys[:, :, None].mT + view.context.log_size[:, None, None, None]
        return of_span(score, view.context)


class RandomRouting(Routing):
    """Scores that mean nothing, the same whenever they are asked for."""

    def scores(self, query: Tensor, view: View) -> Tensor:
        """See ``Routing``."""
        generator = torch.Generator().manual_seed(self.layer)
        outside = view.context.outside
        score = torch.rand(outside.shape[1], query.shape[1], generator=generator).T
        score = score.to(query.device)[None, :, None, None].expand(*query.shape[:-1], -1)
        return score + outside[:, None, None, None]


class ClosedRouting(Routing):
    """Nothing is fetched: what the coarse entries are worth alone."""

    def scores(self, query: Tensor, view: View) -> Tensor:
        """See ``Routing``."""
        return query.new_full((*query.shape[:-1], view.context.span.shape[1]), _NEVER)


class OracleRouting(Routing):
    """The true logits, from the host's keys: not a method, but what routing could reach."""

    def scores(self, query: Tensor, view: View) -> Tensor:
        """See ``Routing``."""
        keys = view.rows.keys(view.context.span.shape[1])
        score = query @ keys.float()[:, :, None].mT
        return score + view.context.outside[:, None, None, None]


class SpanOracleRouting(Routing):
    """Spans by their true attention mass: what whole spans could reach."""

    def scores(self, query: Tensor, view: View) -> Tensor:
        """See ``Routing``."""
        span, spans = view.context.span, view.context.log_size.shape[1]
        score = query @ view.rows.keys(span.shape[1]).float()[:, :, None].mT
        inside = span[:, None, None, None].expand_as(score)
        top = score.amax(-1, keepdim=True)
        mass = score.new_zeros(*score.shape[:-1], spans + 1)
        mass.scatter_add_(-1, inside.where(inside >= 0, spans), (score - top).exp())
        return of_span(mass[..., :spans].log() + top, view.context)


def of_span(score: Tensor, context: Context) -> Tensor:  # [B, Hkv, G, Q, S] -> [B, Hkv, G, Q, T]
    """Gives each token the score of its span."""
    span = context.span.clamp(min=0)
    position = torch.arange(span.shape[1], device=span.device).expand_as(span)
    first = torch.full_like(context.log_size, span.shape[1], dtype=torch.int64)
    first = first.scatter_reduce(1, span, position, "amin").gather(1, span)
    # Where not all of a span fits, its first tokens are taken.
    order = (position - first)[:, None, None, None]
    score = score.gather(-1, span[:, None, None, None].expand(*score.shape[:-1], -1))
    return score - 1e-5 * order + context.outside[:, None, None, None]


def _moments(keys: Tensor, present: Tensor) -> Tensor:  # [B, Hkv, D, D]
    weight = present[:, None, :, None].float().to(keys.device)
    keys = keys.float()
    mean = (keys * weight).sum(2, keepdim=True) / weight.sum(2, keepdim=True).clamp(min=1)
    centred = (keys - mean) * weight
    with torch.autocast(keys.device.type, enabled=False):
        return centred.mT @ centred


TRAINING_FREE: dict[str, Callable[[int], Routing]] = {
    "mean-key": MeanKeyRouting,
    "random": RandomRouting,
    "closed": ClosedRouting,
    "oracle": OracleRouting,
    "span-oracle": SpanOracleRouting,
}
"""Routings that keep nothing of their own."""
