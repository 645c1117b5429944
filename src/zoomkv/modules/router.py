"""Which spans a query reads token by token (SeKV, arXiv 2606.31145, sections 3.2 and 3.3).

A span opens for a head if sigmoid(q'.K' / sqrt(width) + log|S|) is above the head's threshold. The
decision is made for each span alone: there is no softmax over spans, so it means the same however
long the context is. Consecutive query heads share a KV head.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from zoomkv.modules.rank_gate import RankGate


class Routing(Protocol):
    """What readers and caches ask, of a trained router and of one without parameters."""

    @property
    def rank_gate(self) -> RankGate | None:
        """The predictor of rank gates; None keeps every component as it is."""

    def summaries(self, layer: int, coarse_keys: Tensor) -> Tensor:
        """From mean keys ``[B, Hkv, S, D]``, what ``logits`` compares queries with.

        Keep it as it is: ``[B, H or Hkv, S, width]``, the router alone knows what it means.
        """

    def logits(self, layer: int, query: Tensor, summaries: Tensor, size: Tensor) -> Tensor:
        """How much each query wants each span, fp32 ``[B, H, Q, S]``; -inf where size is 0.

        Takes queries ``[B, H, Q, D]`` after RoPE and the tokens of each span, int ``[B, S]``.
        """

    def opens(self, layer: int, logits: Tensor, temperature: float = 0.1) -> Tensor:
        """The decision as fp32 zeros and ones, with a gradient where there is one."""

    def opens_hard(self, layer: int, logits: Tensor) -> Tensor:
        """The same decision, bool."""


@dataclass(frozen=True, slots=True)
class RouterShape:
    """The arguments that a ``Router`` was made with: ``Router(**asdict(shape))`` makes its like.

    Raises:
        ValueError: A size below 1, heads that are no multiple of the KV heads, or a threshold
            outside of (0, 1).
    """

    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    width: int = 32
    rank: int = 32
    threshold: float = 0.05
    """Where thresholds began; what they are now is a parameter."""
    normalise: bool = True

    def __post_init__(self) -> None:
        for name in ("layers", "heads", "kv_heads", "head_dim", "width", "rank"):
            if getattr(self, name) < 1:
                raise ValueError(f"router: {name}={getattr(self, name)}; give at least 1")
        if self.heads % self.kv_heads:
            raise ValueError(
                f"router: heads={self.heads} can't share kv_heads={self.kv_heads} evenly; "
                "give the model's own numbers"
            )
        if not 0 < self.threshold < 1:
            raise ValueError(
                f"router: threshold={self.threshold} is never or always passed; give one in (0, 1)"
            )


class Router(nn.Module):
    """Trained routing: a projection and a threshold for each layer and query head, and rank gates.

    Everything is computed in fp32, whatever autocast says, so a span opens alike in training and
    in use. A new router projects on random subspaces: the mean of q'.k' over draws is q.k (Johnson
    and Lindenstrauss), and it is q.k itself if ``width`` is at least ``head_dim``. With the paper's
    threshold nearly every span is open at first: one of n tokens stays closed only below a score of
    log(0.05 / 0.95) - log(n).

    Args:
        layers: Layers of the model.
        heads: Its query heads.
        kv_heads: Its KV heads.
        head_dim: Width of a head, D.
        width: Width of the space that queries and spans are compared in.
        rank: Components that the rank gates know.
        threshold: Where the threshold of each head begins.
        normalise: Whether summaries have unit length (the released code), so that a score is
            bounded by the projected query; otherwise they are projected mean keys (the paper).
        generator: Where the initial weights come from (a CPU one); torch's own by default.

    Raises:
        ValueError: Contradictory sizes, or a threshold outside of (0, 1).
    """

    def __init__(
        self,
        layers: int,
        heads: int,
        kv_heads: int,
        head_dim: int,
        width: int = 32,
        rank: int = 32,
        threshold: float = 0.05,
        normalise: bool = True,
        generator: torch.Generator | None = None,
    ) -> None:
        super().__init__()
        self.shape = RouterShape(
            layers, heads, kv_heads, head_dim, width, rank, threshold, normalise
        )
        self.projection = nn.Parameter(_subspaces(self.shape, generator))  # [L, H, width, D]
        # A logit, so that a threshold never leaves (0, 1).
        start = math.log(threshold) - math.log1p(-threshold)
        self.threshold_logit = nn.Parameter(torch.full((layers, heads), start))
        self.rank_gate = RankGate(head_dim, rank, generator=generator)
        self.trained_with: dict[str, dict[str, Any]] = {}
        """What its training said of ``splitter`` and ``memory``; empty: not known."""

    def extra_repr(self) -> str:
        return ", ".join(f"{name}={value}" for name, value in asdict(self.shape).items())

    def summaries(
        self,
        layer: int,
        coarse_keys: Tensor,  # [B, Hkv, S, D]
    ) -> Tensor:  # fp32 [B, H, S, width]
        """What each query head knows of each span: its mean key, projected. Zeros stay zeros.

        By linearity that is the mean of the projected keys (here of unit length, if normalised).
        """
        with torch.autocast(coarse_keys.device.type, enabled=False):
            projection = self.projection[layer].float()
            grouped = projection.view(self.shape.kv_heads, -1, self.shape.head_dim)
            projected = coarse_keys.float() @ grouped.mT  # [B, Hkv, S, G * width]
            out = projected.unflatten(-1, (-1, self.shape.width)).transpose(2, 3).flatten(1, 2)
            return F.normalize(out, dim=-1) if self.shape.normalise else out

    def logits(
        self,
        layer: int,
        query: Tensor,  # [B, H, Q, D]
        summaries: Tensor,  # [B, H, S, width]
        size: Tensor,  # int [B, S]
    ) -> Tensor:  # fp32 [B, H, Q, S]
        """The gates' logits: the score of the projected query, and log|S| for the span's size.

        Args:
            layer: Which one.
            query: After RoPE.
            summaries: Of this layer.
            size: Tokens of each span; 0, for entries that are no span, gives -inf.
        """
        with torch.autocast(query.device.type, enabled=False):
            projected = query.float() @ self.projection[layer].float().mT
            scores = projected @ summaries.float().mT / self.shape.width**0.5
            return scores + size.float().log()[:, None, None]

    def thresholds(self, layer: int) -> Tensor:  # fp32 [H]
        """The gate that a span must exceed, for each head."""
        return self.threshold_logit[layer].float().sigmoid()

    def opens(
        self,
        layer: int,
        logits: Tensor,  # [B, H, Q, S]
        temperature: float = 0.1,
    ) -> Tensor:  # fp32 [B, H, Q, S]
        """Decides, exactly 0 or 1, with the gradient of sigmoid((gate - threshold) / temperature).

        That is the paper's straight-through estimator; it reaches logits and thresholds. Entries
        that are no span (-inf) are closed and teach nothing.

        Args:
            layer: Which one.
            logits: As ``logits`` gives them.
            temperature: Width of the slope around the threshold.

        Raises:
            ValueError: ``temperature`` not above 0.
        """
        if not temperature > 0:
            raise ValueError(f"temperature={temperature}: give a number above 0")
        gap = logits.float().sigmoid() - self.thresholds(layer)[:, None, None]
        soft = (gap / temperature).sigmoid().masked_fill(logits.isneginf(), 0)
        return self.opens_hard(layer, logits).float() + (soft - soft.detach())

    def opens_hard(self, layer: int, logits: Tensor) -> Tensor:  # bool [B, H, Q, S]
        """Whether a gate exceeds its head's threshold; an equal one does not.

        Logits are compared, not their sigmoids: these round to 1 beyond a logit of 17, where a
        threshold could no longer tell spans apart.
        """
        return logits.float() > self.threshold_logit[layer].float()[:, None, None]


class MeanKeyRouter:
    """Routing without training: how well the query matches the mean key, as attention would.

    The score of a span is q.kbar / sqrt(D) + log|S|, which is what its coarse entry weighs in
    attention. Such a score has no scale of its own, only an order, so a fixed threshold would mean
    nothing: every span may open (threshold 0), and the budget takes them from the highest score on.
    """

    rank_gate = None

    def summaries(self, layer: int, coarse_keys: Tensor) -> Tensor:
        """The mean keys themselves, ``[B, Hkv, S, D]``: nothing more to store."""
        return coarse_keys

    def logits(
        self,
        layer: int,
        query: Tensor,  # [B, H, Q, D]
        summaries: Tensor,  # [B, Hkv, S, D]
        size: Tensor,  # int [B, S]
    ) -> Tensor:  # fp32 [B, H, Q, S]
        """The score of each span, and -inf for entries of size 0."""
        with torch.autocast(query.device.type, enabled=False):
            count, dim = query.shape[2:]
            grouped = query.float().unflatten(1, (summaries.shape[1], -1)).flatten(2, 3)
            scores = grouped @ summaries.float().mT / dim**0.5  # [B, Hkv, G * Q, S]
            scores = scores.unflatten(2, (-1, count)).flatten(1, 2)
            return scores + size.float().log()[:, None, None]

    def opens(self, layer: int, logits: Tensor, temperature: float = 0.1) -> Tensor:
        """``opens_hard`` as fp32 numbers; constants, as nothing is learnt."""
        return self.opens_hard(layer, logits).float()

    def opens_hard(self, layer: int, logits: Tensor) -> Tensor:  # bool [B, H, Q, S]
        """True for every span."""
        return ~logits.isneginf()


def _subspaces(shape: RouterShape, generator: torch.Generator | None) -> Tensor:
    """Orthogonal rows (or columns, if there are more rows than D), long enough to keep products."""
    long, short = max(shape.head_dim, shape.width), min(shape.head_dim, shape.width)
    draws = torch.randn(shape.layers, shape.heads, long, short, generator=generator)
    basis = torch.linalg.qr(draws).Q
    if shape.width > shape.head_dim:
        return basis
    return basis.mT.contiguous() * (shape.head_dim / shape.width) ** 0.5
