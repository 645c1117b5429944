"""Whole spans by a trained gate, for each query head (SeKV, 2606.31145, sections 3.2 and 3.3)."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from zoomkv.caches.routing import Choice, Routing, View
from zoomkv.modules.reader import Entries
from zoomkv.modules.router import Router


class SpanRouting(Routing):
    """Opens the spans whose gate passes the head's threshold; each head reads those it opened.

    Heads of a group share the rows of a span that any of them opened. Where these do not all fit,
    spans close from the least gate on, a span's gate being the best in the group; one that would
    never fit is not counted.

    Args:
        layer: Which one.
        router: Trained.
        threshold: One gate for all layers and heads, in place of the learnt ones.
    """

    def __init__(self, layer: int, router: Router, threshold: float | None = None) -> None:
        super().__init__(layer)
        self._router = router
        self._limit = None if threshold is None else math.log(threshold / (1 - threshold))
        self._summaries: Tensor | None = None  # [B, H, S, width]

    @torch.no_grad()
    def summarise(self, entries: Entries, dtype: torch.dtype) -> None:
        """See ``Routing``."""
        self._summaries = self._router.summaries(self.layer, entries.plain()[0]).to(dtype)

    @torch.no_grad()
    def choose(self, query: Tensor, scaled: Tensor, exact: Tensor, view: View) -> Choice:
        """See ``Routing``."""
        assert self._summaries is not None
        groups, span, log_size = scaled.shape[1:3], view.context.span, view.context.log_size
        # The size's part of the logit is in ``log_size``, which is -inf where there is no span.
        ones = torch.ones_like(log_size)
        logits = self._router.logits(self.layer, query, self._summaries, ones)
        logits = logits + log_size[:, None, None]
        passed = self._opens(logits).unflatten(1, groups)  # [B, Hkv, G, Q, S]
        best = logits.unflatten(1, groups).amax(2)  # [B, Hkv, Q, S]
        size = log_size.exp().round().long()[:, None, None]
        room = view.context.slots[:, None, None, None]
        wanted = passed.any(2) & (size <= room)
        order = best.masked_fill(~wanted, -torch.inf).argsort(dim=-1, descending=True, stable=True)
        size = size.expand_as(best).where(wanted, 0)
        fits = size.gather(-1, order).cumsum(-1) <= room
        kept = torch.zeros_like(wanted).scatter(-1, order, fits) & wanted
        opened = passed & kept[:, :, None]
        of = span[:, None, None].expand(*kept.shape[:-1], -1)
        tokens = kept.gather(-1, of.clamp(min=0)) & (of >= 0)
        there, position = tokens.to(torch.uint8).topk(view.context.most, dim=-1)
        alive = (view.context.slots >= 0)[:, None]
        return Choice(
            position,
            there.bool(),
            opened,
            {
                "offered": (~log_size.isneginf()).sum(1, keepdim=True) * alive,
                "passed": passed.sum((3, 4)).flatten(1) * alive,
                "zoomed": opened.sum((3, 4)).flatten(1) * alive,
            },
        )

    def bytes_per_entry(self, dtype: torch.dtype) -> int:
        """See ``Routing``."""
        shape = self._router.shape
        return shape.width * (shape.heads // shape.kv_heads) * dtype.itemsize

    def select(self, rows: Tensor) -> None:
        """See ``Routing``."""
        if self._summaries is not None:
            self._summaries = self._summaries[rows.to(self._summaries.device)]

    def device_tensors(self) -> Iterator[Tensor]:
        """See ``Routing``."""
        if self._summaries is not None:
            yield self._summaries

    def _opens(self, logits: Tensor) -> Tensor:
        if self._limit is None:
            return self._router.opens_hard(self.layer, logits)
        return logits > self._limit
