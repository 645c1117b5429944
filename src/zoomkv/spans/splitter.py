"""How a context is cut into spans, as one object that a router and a cache can agree on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from zoomkv.spans.surprisal import Spans, fine_spans, paper_spans, smallest_alpha

Scheme = Literal["fine", "paper", "fixed"]


@dataclass(frozen=True)
class Splitter:
    """Cuts texts whose first tokens (the sinks) are left out; bounds are checked by its users."""

    scheme: Scheme = "fine"
    """``fine_spans``, ``paper_spans``, or ``fixed``: even pieces, whatever the text says."""
    min_span: int = 12
    """Tokens of the shortest span; ``fixed`` does without."""
    max_span: int | None = 32
    """Tokens of the longest span; None: no limit, which ``paper`` alone knows."""
    alpha: float = 1.0
    """``paper``: deviations above the mean at which a token is an anchor."""
    auto: bool = False
    """``paper``: raise ``alpha`` until what stays whole fits."""
    anchor_share: float = 0.0
    """``fine``: share of the tokens that are anchors."""

    @property
    def shortest(self) -> int:
        """Tokens that are cut into spans at least; fewer would stay whole, or be no even piece."""
        if self.scheme == "fixed":
            assert self.max_span is not None
            return (self.max_span + 1) // 2
        return self.min_span

    def cut(
        self, surprisal: Tensor, length: Tensor, rows: Tensor | None = None, coarse: float = 1.0
    ) -> Spans:
        """The spans of some texts.

        Args:
            surprisal: Nats ``[B, T]``.
            length: Tokens of each text ``[B]``, at least 1.
            rows: What may stay: anchors, runs that are too short, and entries of spans. Needed if
                ``alpha`` is found by itself.
            coarse: Rows that the entry of a span takes.
        """
        if self.scheme == "fixed":
            # Where nothing is an anchor, a text is one run, cut into even pieces.
            return paper_spans(surprisal, length, float("inf"), 1, self.max_span, sinks=0)
        if self.scheme == "fine":
            assert self.max_span is not None
            bounds = (self.min_span, self.max_span)
            return fine_spans(surprisal, length, *bounds, self.anchor_share, sinks=0)
        alpha: float | Tensor = self.alpha
        if self.auto:
            assert rows is not None
            alpha = smallest_alpha(
                surprisal,
                length,
                rows,
                coarse,
                self.min_span,
                self.max_span,
                lowest=self.alpha,
                sinks=0,
            )
        return paper_spans(surprisal, length, alpha, self.min_span, self.max_span, sinks=0)
