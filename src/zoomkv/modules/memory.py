"""The spans of one layer at both resolutions (SeKV, arXiv 2606.31145, section 3.2).

A span has one coarse entry, its surprisal-weighted mean key and value, and low-rank factors from
which its tokens are rebuilt. What is rebuilt depends on the rank gates alone: the base is frozen,
so factors and singular values are constants.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from zoomkv.modules.rank_gate import RankGate, kept
from zoomkv.ops.lowrank import Method, break_even_rank, factorise, rebuild
from zoomkv.ops.rope import Rotary
from zoomkv.spans.surprisal import Spans, span_sums

Recovery = Literal["lowrank", "exact"]
"""Whether tokens come back from factors, or as they were."""

KEYS, VALUES = 0, 1
"""Where they stand in the first dimension of what is kept of both."""

Rows = tuple[Tensor, Tensor]
"""Keys and values ``[B, Hkv, T, D]`` by position."""


@dataclass(frozen=True, slots=True)
class Factors:
    """All spans' keys, and apart from them all spans' values, as products A V^T; zeros beyond."""

    a: Tensor
    """``[2, B, Hkv, S, longest, R]``, sigma included."""
    v: Tensor
    """``[2, B, Hkv, S, D, R]``"""
    sigma: Tensor
    """Singular values, largest first, fp32 ``[2, B, Hkv, S, R]``; 0: no such component."""


@dataclass(frozen=True, slots=True)
class Deployed:
    """What is stored of spans whose negligible components were dropped, and what that costs."""

    a: Tensor
    """Gates and sigma included, ``[2, B, Hkv, S, longest, r]``; r is the largest rank."""
    v: Tensor
    """``[2, B, Hkv, S, D, r]``"""
    rank: Tensor
    """Components of each span, int64 ``[2, B, Hkv, S]``."""
    error: Tensor
    """Frobenius norm of what is lost over that of the rows, fp32 ``[2, B, Hkv, S]``."""
    bytes: Tensor
    """What the factors of each span take, padding left out, int64 ``[2, B, Hkv, S]``."""


@dataclass(frozen=True, slots=True)
class SpanMemory:
    """Made by ``build``; keys and values are those of a context, by position."""

    keys: Tensor
    """After RoPE, ``[B, Hkv, T, D]``; what is outside of spans is read as it is."""
    values: Tensor
    """Likewise."""
    spans: Spans
    coarse_keys: Tensor
    """Mean key of each span, fp32 ``[B, Hkv, S, D]``."""
    coarse_values: Tensor
    """Its mean value."""
    factors: Factors | None
    """None: tokens come back as they were."""
    rotary: Rotary | None
    """Rotates rebuilt keys; None: they were factorised after RoPE."""

    @classmethod
    def build(
        cls,
        keys: Tensor,  # [B, Hkv, T, D]
        values: Tensor,  # [B, Hkv, T, D]
        spans: Spans,
        weights: Tensor,  # [B, T]
        rank: int = 32,
        rho: float = 1.0,
        recovery: Recovery = "lowrank",
        rotary: Rotary | None = None,
        method: Method = "gram",
    ) -> SpanMemory:
        """Sums up every span and factorises it: all rows, heads and spans, keys and values at once.

        Args:
            keys: After RoPE, by position.
            values: By position.
            spans: Where the spans are.
            weights: What each token counts for (``span_weights``).
            rank: Most components of a span. No span gets more than pay for themselves
                (``break_even_rank``), nor less than one.
            rho: Share of the rows' storage that factors may take.
            recovery: ``exact`` leaves the factors out.
            rotary: How the model rotates. Given, keys are factorised before RoPE, where long spans
                have a lower rank, and rotated once they are rebuilt; None: after RoPE.
            method: As for ``factorise``.

        Raises:
            ValueError: Keys of another context than the spans, a rank below 1 or another recovery.
        """
        if keys.shape[::2] != spans.number.shape or keys.shape != values.shape:
            raise ValueError(
                f"keys of {list(keys.shape)} and values of {list(values.shape)} for spans of "
                f"{list(spans.number.shape)} tokens; give those of one context"
            )
        if rank < 1 or recovery not in ("lowrank", "exact"):
            raise ValueError(
                f"rank={rank}, recovery='{recovery}': give at least 1, and lowrank or exact"
            )
        factors = None
        if recovery == "lowrank":
            before = keys
            if rotary is not None:
                before = rotary.unrotate(keys.float(), _positions(keys))
            factors = _factors(before, values, spans, rank, rho, method)
        return cls(
            keys,
            values,
            spans,
            span_sums(keys, weights, spans),
            span_sums(values, weights, spans),
            factors,
            rotary,
        )

    def gates(self, rank_gate: RankGate | None = None) -> Tensor:  # fp32 [2, B, Hkv, S, R]
        """The gate of every component, keys and values each from their own spectrum.

        They depend on the span alone, so one call serves all queries.

        Args:
            rank_gate: The predictor; None: gates of 1 where there is a component.

        Raises:
            ValueError: Tokens come back exactly, or as ``RankGate``.
        """
        sigma = self._stored().sigma
        if rank_gate is None:
            return (sigma > 0).float()
        return rank_gate(sigma, self.coarse_keys)

    def rows(self, gates: Tensor | None = None) -> Rows:  # [2, B, Hkv, S, R]
        """The whole context with the tokens of spans as they would come back.

        Args:
            gates: Of each component; the result has a gradient for them. None: all are kept. They
                don't matter if tokens come back exactly.

        Returns:
            Keys and values ``[B, Hkv, T, D]``, tokens outside of spans as they are; fp32 if
            anything is rebuilt.
        """
        if self.factors is None:
            return self.keys, self.values
        a = self.factors.a if gates is None else self.factors.a * gates[..., None, :]
        return self._placed(a, self.factors.v)

    def error(self, rows: Rows) -> Tensor:  # fp32 [2, B, Hkv, S]
        """Frobenius norm of what rows of spans lack, over that of the true rows; keys, values."""
        found = []
        for true, rebuilt in zip((self.keys, self.values), rows, strict=True):
            true = true.float()
            found.append(self._norm(rebuilt.float() - true) / self._norm(true).clamp(min=1e-30))
        return torch.stack(found)

    @torch.no_grad()
    def deploy(
        self, gates: Tensor, least: float = 0.05, dtype: torch.dtype | None = None
    ) -> Deployed:
        """Drops what the gates make negligible and multiplies the rest by its gates.

        Args:
            gates: Of each component, ``[2, B, Hkv, S, R]``.
            least: The gate below which a component goes. The first one of a span stays if all go.
            dtype: Of the stored factors; by default that of the keys.

        Raises:
            ValueError: Tokens come back exactly: there is nothing to store.
        """
        factors, dtype = self._stored(), dtype or self.keys.dtype
        stays = kept(gates, least)
        rank = stays.sum(-1)
        most = int(rank.max()) if rank.numel() else 0
        order = stays.long().argsort(dim=-1, descending=True, stable=True)[..., None, :most]

        def packed(x: Tensor, factor: Tensor) -> Tensor:
            x = (x * factor.where(stays, 0)[..., None, :]).to(dtype)
            return x.gather(-1, order.expand(*x.shape[:-1], most))

        a, v = packed(factors.a, gates), packed(factors.v, torch.ones_like(gates))
        stored = rank * (self.spans.size[:, None] + v.shape[-2]) * v.element_size()
        return Deployed(a, v, rank, self.error(self._placed(a.float(), v.float())), stored)

    def _stored(self) -> Factors:
        if self.factors is None:
            raise ValueError("tokens come back exactly: there are no factors; build lowrank ones")
        return self.factors

    def _placed(self, a: Tensor, v: Tensor) -> Rows:
        """Rebuilt tokens at their positions, the others as they are."""
        keys, values, spans = self.keys.float(), self.values.float(), self.spans
        if not a.numel():
            return keys, values
        inside = spans.number >= 0
        # As in Spans.positions: which token of its span each one is.
        first = (spans.size.cumsum(1) - spans.size).gather(1, spans.number.clamp(min=0))
        slot = spans.number * a.shape[4] + inside.cumsum(1) - 1 - first
        rows = rebuild(a, v).flatten(3, 4)  # [2, B, Hkv, S * longest, D]
        before = torch.arange(rows.shape[:3].numel(), device=slot.device).view(rows.shape[:3])
        flat = before[..., None] * rows.shape[3] + slot.where(inside, 0)[:, None]
        # Unlike gather, this keeps no copy of the rows for the backward pass.
        rows = rows.flatten(0, 3).index_select(0, flat.flatten())
        new_keys, new_values = rows.view(2, *keys.shape)
        if self.rotary is not None:
            new_keys = self.rotary.rotate(new_keys, _positions(keys))
        inside = inside[:, None, :, None]
        return new_keys.where(inside, keys), new_values.where(inside, values)

    def _norm(self, x: Tensor) -> Tensor:  # [B, Hkv, T, D] -> [B, Hkv, S]
        squares = x.square().sum(-1, keepdim=True)
        ones = torch.ones_like(self.spans.number, dtype=torch.float32)
        return span_sums(squares, ones, self.spans).squeeze(-1).sqrt()


def _factors(
    keys: Tensor, values: Tensor, spans: Spans, rank: int, rho: float, method: Method
) -> Factors:
    heads, width = keys.shape[1], keys.shape[3]
    at = spans.positions  # [B, S, longest]
    index = at.flatten(1)[:, None, :, None].expand(-1, heads, -1, width)
    rows = torch.stack([x.float().gather(2, index) for x in (keys, values)])
    rows = rows.unflatten(3, at.shape[1:])  # [2, B, Hkv, S, longest, D]
    shape = rows.shape[:4]
    length = spans.size[None, :, None].expand(shape).flatten()
    worth = break_even_rank(length, width, rho).clamp(min=1, max=rank)
    parts = factorise(rows.flatten(0, 3), length, worth, method)
    return Factors(*(part.unflatten(0, shape) for part in parts))


def _positions(x: Tensor) -> Tensor:  # [..., T, D] -> [T]
    return torch.arange(x.shape[-2], device=x.device)
