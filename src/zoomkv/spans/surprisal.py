"""A prompt cut into spans where it surprises (SeKV, arXiv 2606.31145, sections 3.1 and 3.2).

Everything here is by *position*: the tokens of a row, pads not counted. ``by_position`` is the one
door from columns. Two schemes: ``paper_spans`` cuts at every token above a threshold, which leaves
most of ordinary text in runs too short to compress; ``fine_spans`` cuts at the most surprising
token within reach and keeps few tokens whole.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

SINKS = 4
"""First tokens of a row, which every query reads: they are always anchors."""

# Surprisals are compared as integers, in steps of 2**-16 nats: above fp32's rounding, which depends
# on the shape of the batch, and exact to sum in any order. What surprises more than 64 nats counts
# as 64, so that the squares of half a million fit into int64.
_STEPS = 2.0**16
_CEILING = 64.0

# Tried in turn; the last one leaves no anchor but the sinks.
_ALPHA_STEP = 0.125
_ALPHA_STEPS = 72


@dataclass(frozen=True, slots=True)
class Spans:
    """Where the tokens of every row of a batch belong: each is an anchor, exact, or in a span.

    A span is the range ``[start, end)`` less the anchors inside; spans are disjoint and in order.
    Entries from ``count`` on are empty ranges.
    """

    length: Tensor
    """Tokens of each row, int64 ``[B]``."""
    anchor: Tensor
    """Tokens that stay whole because they surprise, and the first ones, bool ``[B, T]``."""
    number: Tensor
    """The span that a token is in, int64 ``[B, T]``; -1: in none."""
    start: Tensor
    """First token of each span, int64 ``[B, S]``."""
    end: Tensor
    """One past its last token, int64 ``[B, S]``."""
    size: Tensor
    """Its tokens, int64 ``[B, S]``."""
    count: Tensor
    """Spans of each row, int64 ``[B]``."""

    @property
    def exact(self) -> Tensor:  # bool [B, T]
        """Tokens of runs that are too short to compress."""
        return _exists(self.number, self.length) & ~self.anchor & (self.number < 0)

    @property
    def positions(self) -> Tensor:  # int64 [B, S, longest]
        """Tokens of each span in order; entries from ``size`` on are 0."""
        batch, spans = self.size.shape
        if not spans:
            return self.size.new_zeros(batch, 0, 0)
        inside = self.number >= 0
        first = (self.size.cumsum(1) - self.size).gather(1, self.number.clamp(min=0))
        longest = int(self.size.max())
        place = self.number * longest + inside.cumsum(1) - 1 - first
        out = self.size.new_zeros(batch, spans * longest + 1)  # the last column is dropped
        out.scatter_(1, place.where(inside, spans * longest), _columns(inside).expand_as(place))
        return out[:, :-1].reshape(batch, spans, longest)

    def rows(self, coarse: float) -> Tensor:  # fp64 [B]
        """Rows that a prompt takes while no span is open, if a span takes as much as ``coarse``."""
        whole = (self.anchor | self.exact).sum(1)
        return whole + coarse * self.count.double()


def by_position(surprisal: Tensor, real: Tensor) -> tuple[Tensor, Tensor]:
    """Moves what stands in columns to each row's own positions: pads go.

    Args:
        surprisal: Values ``[B, columns]``.
        real: False for padding, wherever it stands, bool ``[B, columns]``.

    Returns:
        The values of real columns ``[B, T]`` from position 0 on, zeros behind, T being the longest
        row's tokens; and the tokens of each row, int64 ``[B]``.
    """
    length = real.sum(1)
    longest = int(length.max())
    place = (real.cumsum(1) - 1).where(real, longest)
    out = surprisal.new_zeros(len(real), longest + 1)  # the last column takes the pads
    return out.scatter(1, place, surprisal)[:, :-1].contiguous(), length


def paper_spans(
    surprisal: Tensor,  # [B, T]
    length: Tensor,  # [B]
    alpha: float | Tensor = 1.0,  # or [B]
    min_span: int = 16,
    max_span: int | None = 256,
    sinks: int = SINKS,
) -> Spans:
    """Cuts at every token above mean + ``alpha`` standard deviations, and keeps it as an anchor.

    Mean and (population) deviation are over all tokens of a row, the first one, 0, included. A run
    between anchors is a span, or exact if shorter than ``min_span``. One longer than ``max_span``
    is cut into the fewest pieces that fit, as even as can be: the next most surprising token of a
    dull stretch says little, and even pieces bound the loss of a low rank best.

    Args:
        surprisal: Nats by position; what stands beyond ``length`` is not looked at.
        length: Tokens of each row, at least 1.
        alpha: One for all rows or one for each; ``inf`` leaves the sinks alone as anchors.
        min_span: Tokens that are worth a span.
        max_span: Tokens of the longest span (the paper has no limit: None).
        sinks: First tokens that are anchors whatever they say.

    Raises:
        ValueError: ``min_span`` below 1, or a ``max_span`` that even halves can't satisfy.
    """
    if min_span < 1 or (max_span is not None and max_span < 2 * min_span - 1):
        raise ValueError(
            f"spans of {min_span} to {max_span} tokens; give min_span >= 1, and "
            "max_span >= 2 * min_span - 1 or None"
        )
    exists = _exists(surprisal, length)
    steps = _steps(surprisal).where(exists, 0)
    mean = steps.sum(1) / length.double()
    deviation = ((steps * steps).sum(1) / length.double() - mean * mean).clamp(min=0).sqrt()
    limit = mean + deviation * alpha
    anchor = ((steps > limit[:, None]) | (_columns(steps) < sinks)) & exists
    # An anchor is a range of its own, with nothing left inside.
    opens = (anchor | F.pad(anchor[:, :-1], (1, 0))) & exists
    opens[:, 0] = True  # also without sinks
    if max_span is not None:
        position = _columns(steps)
        since = position - position.where(opens, 0).cummax(dim=1).values
        _, width = _ranges(opens, exists)
        pieces = (width + max_span - 1) // max_span
        opens = opens | ((since * pieces) // width > ((since - 1) * pieces) // width)
    return _spans(anchor, opens, length, min_span)


def smallest_alpha(
    surprisal: Tensor,  # [B, T]
    length: Tensor,  # [B]
    rows: float | Tensor,  # or [B]
    coarse: float,
    min_span: int = 16,
    max_span: int | None = 256,
    lowest: float = 1.0,
    sinks: int = SINKS,
) -> Tensor:  # fp64 [B]
    """The least ``alpha`` of ``paper_spans`` with which a prompt takes no more than ``rows``.

    Tried are ``lowest``, and from there steps of 1/8 up to 9 more; then ``inf``.

    Args:
        surprisal: As for ``paper_spans``.
        length: As for ``paper_spans``.
        rows: What anchors, exact runs and summaries may take together.
        coarse: What the summary of a span takes, in rows.
        min_span: As for ``paper_spans``.
        max_span: As for ``paper_spans``.
        lowest: Where to begin.
        sinks: As for ``paper_spans``.

    Returns:
        One for each row; ``inf`` also where even that takes too much (see ``Spans.rows``).
    """
    best = torch.full_like(length, torch.inf, dtype=torch.float64)
    for number in range(_ALPHA_STEPS + 1):
        alpha = lowest + number * _ALPHA_STEP
        taken = paper_spans(surprisal, length, alpha, min_span, max_span, sinks).rows(coarse)
        best = best.masked_fill((taken <= rows) & best.isinf(), alpha)
        if not best.isinf().any():
            break
    return best


def fine_spans(
    surprisal: Tensor,  # [B, T]
    length: Tensor,  # [B]
    min_span: int = 12,
    max_span: int = 32,
    anchor_share: float = 0.015,
    sinks: int = SINKS,
) -> Spans:
    """Cuts at the most surprising token that is ``min_span`` to ``max_span`` after the last cut.

    The first range begins behind the sinks, and a cut belongs to the range that it begins; of equal
    surprisals the first counts. The rest of a row is one range once it fits. Cuts leave at least
    ``min_span`` tokens behind them, so that every range is within bounds if ``max_span`` is 2 *
    ``min_span`` - 1 or more; a last one that is shorter stays exact.

    The most surprising tokens are anchors, wherever they stand: a span is its range without them.

    Args:
        surprisal: Nats by position; what stands beyond ``length`` is not looked at.
        length: Tokens of each row, at least 1.
        min_span: Tokens of the shortest range.
        max_span: Tokens of the longest range.
        anchor_share: Share of the tokens behind the sinks that are anchors, rounded down.
        sinks: First tokens that are anchors whatever they say.

    Raises:
        ValueError: Bounds that are not 1 <= min <= max, or a share outside 0 to 1.
    """
    if not 1 <= min_span <= max_span:
        raise ValueError(f"spans of {min_span} to {max_span} tokens; give 1 <= min <= max")
    if not 0 <= anchor_share <= 1:
        raise ValueError(f"anchor_share is {anchor_share}; give a share from 0 to 1")
    columns = surprisal.shape[1]
    exists, position = _exists(surprisal, length), _columns(surprisal)
    steps = _steps(surprisal)

    body = steps.where(exists & (position >= sinks), -1)
    order = body.argsort(dim=1, descending=True, stable=True)
    rank = torch.empty_like(order).scatter_(1, order, position.expand_as(order))
    wanted = ((length - sinks).clamp(min=0).double() * anchor_share).floor()
    anchor = ((rank < wanted[:, None]) | (position < sinks)) & exists

    # Where the cut after one at t would be, for every t at once.
    allowed = steps.where(position <= length[:, None] - min_span, -1)
    ahead = F.pad(allowed, (0, max_span), value=-1)[:, min_span:]
    following = position + min_span + ahead.unfold(1, max_span - min_span + 1, 1).argmax(dim=-1)
    following = following.where(length[:, None] - position > max_span, columns)
    # From the first cut, jumps of 1, 2, 4, ... cuts reach all of them; the last column is the end.
    jump = F.pad(following, (0, 1), value=columns)
    cut = torch.zeros_like(jump)
    cut[:, min(sinks, columns)] = 1
    for _ in range((columns // min_span).bit_length()):
        cut = (cut + torch.zeros_like(cut).scatter_add_(1, jump, cut)).clamp(max=1)
        jump = jump.gather(1, jump)
    return _spans(anchor, cut[:, :-1] > 0, length, min_span)


def span_weights(surprisal: Tensor, spans: Spans) -> Tensor:  # [B, T] -> fp32 [B, T]
    """What each token counts for in its span: its share of the span's surprisal (section 3.2).

    The weights of a span sum to 1; they are uniform if nothing in it surprises. Tokens outside of
    spans weigh 0.
    """
    inside = spans.number >= 0
    nats = surprisal.float().clamp(0, _CEILING).where(inside, 0)
    size, total = torch.zeros_like(nats), torch.zeros_like(nats)
    where = spans.number.clamp(min=0)
    total = total.scatter_add_(1, where, nats).gather(1, where)
    size = size.scatter_add_(1, where, inside.float()).gather(1, where)
    return torch.where(total > 0, nats / total, 1 / size).where(inside, 0)


def span_sums(
    x: Tensor,  # [B, Hkv, T, D]
    weights: Tensor,  # [B, T]
    spans: Spans,
) -> Tensor:  # fp32 [B, Hkv, S, D]
    """Weighted sums of the rows of each span; with ``span_weights``, its mean key or value.

    Args:
        x: Keys or values by position.
        weights: What each token counts for.
        spans: Where the spans are.

    Returns:
        A new tensor; zeros for entries beyond a row's spans. On CUDA the order of addition, and
        with it the last bit, may vary.
    """
    batch, heads, _, width = x.shape
    size = spans.size.shape[1] + 1  # the last one takes what is in no span
    place = spans.number.where(spans.number >= 0, size - 1)[:, None]
    base = torch.arange(batch * heads, device=x.device).view(batch, heads, 1) * size
    out = torch.zeros(batch * heads * size, width, device=x.device)
    weighted = x.float() * weights[:, None, :, None]
    out = out.index_add(0, (base + place).flatten(), weighted.reshape(-1, width))
    return out.view(batch, heads, size, width)[:, :, :-1].clone(
        memory_format=torch.contiguous_format
    )


def _spans(anchor: Tensor, opens: Tensor, length: Tensor, min_span: int) -> Spans:
    """Ranges that begin where ``opens`` says, without anchors; short and empty ones are none."""
    exists = _exists(anchor, length)
    opens = opens & exists
    opens[:, 0] = True
    group, width = _ranges(opens, exists)
    inside = exists & ~anchor & (width >= min_span)
    left = torch.zeros_like(group).scatter_add_(1, group, inside.long())
    number = (left > 0).cumsum(1) - 1  # of each range among those that are spans
    count = number[:, -1] + 1
    number = number.gather(1, group).where(inside, -1)

    total = int(count.max())
    place = number.where(inside, total)
    position = _columns(number).expand_as(number)
    empty = place.new_zeros(len(length), total + 1)  # the last column takes what is in no span
    start = empty.scatter_reduce(1, place, position, "amin", include_self=False)
    end = empty.scatter_reduce(1, place, position + 1, "amax", include_self=False)
    size = empty.scatter_add(1, place, inside.long())
    start, end, size = (x[:, :-1].contiguous() for x in (start, end, size))
    return Spans(length, anchor, number, start, end, size, count)


def _ranges(opens: Tensor, exists: Tensor) -> tuple[Tensor, Tensor]:  # int64 [B, T]
    """The number of the range that each token is in, and the tokens of that range."""
    number = opens.cumsum(1) - 1
    width = torch.zeros_like(number).scatter_add_(1, number, exists.long())
    return number, width.gather(1, number)


def _steps(surprisal: Tensor) -> Tensor:  # int64
    return (surprisal.float().clamp(0, _CEILING) * _STEPS).round().long()


def _columns(x: Tensor) -> Tensor:  # [B, T] -> [1, T]
    return torch.arange(x.shape[1], device=x.device)[None]


def _exists(x: Tensor, length: Tensor) -> Tensor:  # [B, T], [B] -> bool [B, T]
    return _columns(x) < length[:, None]
