"""What queries look at: attention weights as scores of stored rows."""

import torch
import torch.nn.functional as F
from torch import Tensor

_CHUNK = 2**25  # attention weights at once: 128 MiB in fp32


def observed_scores(
    query: Tensor,  # [B, H, N, D]
    query_positions: Tensor,  # [B, N] or [B, H, N]
    key: Tensor,  # [B, Hkv, T, D]
    key_positions: Tensor,  # [B, 1 or Hkv, T]
    readable: Tensor,  # bool [B, 1 or Hkv, T]
) -> Tensor:  # [B, Hkv, G, N, T]
    """Scaled products of kept queries with stored keys, -inf where a query may not look.

    A query sees readable keys at or before its own position; one at position -1 is missing and sees
    nothing. In fp32, whatever the dtype.
    """
    batch, heads, count, width = query.shape
    kv_heads, rows = key.shape[1:3]
    grouped = query.float().view(batch, kv_heads, -1, width)  # [B, Hkv, G N, D]
    scores = grouped @ key.float().transpose(-1, -2) * width**-0.5
    scores = scores.view(batch, kv_heads, heads // kv_heads, count, rows)
    if query_positions.dim() == 2:
        query_positions = query_positions[:, None].expand(-1, heads, -1)
    when = query_positions.view(batch, kv_heads, -1, count)[..., None]
    seen = (key_positions[:, :, None, None] <= when) & readable[:, :, None, None]
    return scores.masked_fill_(~seen, -torch.inf)


def weights_of(scores: Tensor) -> Tensor:  # [..., T] -> [..., T]
    """Softmax over the last dimension; a query that sees nothing gives zeros."""
    return scores.softmax(-1).nan_to_num_(0.0)


def mean_over_queries(
    weights: Tensor,  # [B, Hkv, G, N, T]
    present: Tensor,  # bool [B, N]
) -> Tensor:  # [B, Hkv, T]
    """Mean over the heads of a group and the queries that are there."""
    count = present.sum(-1).clamp(min=1).to(weights.device)
    return weights.sum(3).mean(2) / count[:, None, None]


def pooled(
    score: Tensor,  # [B, h, T]
    positions: Tensor,  # [B, h, T]
    valid: Tensor,  # bool [B, h, T]
    kernel: int,
    kind: str,  # avg or max
) -> Tensor:  # [B, h, T]
    """Pools scores over neighbours in the order of their positions, whatever slots they are in.

    Neighbours are the next of the given rows, as in a cache whose rows stand in order. Beyond the
    ends, ``avg`` counts zeros (as the published code does) and ``max`` nothing. Rows that are not
    ``valid`` get more than all others.
    """
    above = score.amax(-1, keepdim=True) + 1
    if kernel == 1:
        return score.where(valid, above)
    last = torch.iinfo(positions.dtype).max
    order = positions.masked_fill(~valid, last).argsort(dim=-1).expand(score.shape)
    # Zeros stand where no row is, so the end of a short row is an end like any other.
    in_order = score.masked_fill(~valid, 0.0).gather(-1, order)
    if kind == "avg":
        smooth = F.avg_pool1d(in_order, kernel, stride=1, padding=kernel // 2)
    else:
        smooth = F.max_pool1d(in_order, kernel, stride=1, padding=kernel // 2)
    return torch.empty_like(score).scatter_(-1, order, smooth).where(valid, above)


def attention_received(
    query: Tensor,  # [B, H, Q, D]
    key: Tensor,  # [B, Hkv, T, D]
    stored: int,
    mask: Tensor | None = None,  # bool [B or 1, 1, Q, T]
    real: Tensor | None = None,  # bool [B, Q]
) -> Tensor:  # [B, Hkv, T]
    """Attention that each key gets, summed over the queries and the heads of a group.

    Products are in the query's dtype, as in attention itself, softmax and sums in fp32. Queries go
    in chunks: there is never a matrix of all queries and all keys.

    Args:
        query: Queries of the tokens of one forward.
        key: Keys that they may read, those of their own tokens included.
        stored: Keys before those of the forward, at most; a query reads none beyond its own.
        mask: What each query may read, something for each; None: all keys up to its own.
        real: Queries that count; None: all.
    """
    batch, heads, count, width = query.shape
    kv_heads, rows = key.shape[1:3]
    key = key.to(query.dtype).transpose(-1, -2)
    query = (query * width**-0.5).view(batch, kv_heads, -1, count, width)
    sums = torch.zeros(batch, kv_heads, rows, device=key.device)
    size = min(count, max(1, _CHUNK // (batch * heads * rows)))
    for start in range(0, count, size):
        stop = min(start + size, count)
        reach = min(stored + stop, rows)
        part = query[:, :, :, start:stop].reshape(batch, kv_heads, -1, width)
        scores = (part @ key[..., :reach]).view(batch, kv_heads, -1, stop - start, reach)
        if mask is not None:
            scores.masked_fill_(~mask[:, :, None, start:stop, :reach], -torch.inf)
        elif stop - start > 1:
            seen = torch.ones(stop - start, reach, dtype=torch.bool, device=key.device)
            scores.masked_fill_(~seen.tril(stored + start), -torch.inf)
        weights = scores.softmax(-1, dtype=torch.float32)
        if real is not None:
            absent = ~real[:, None, None, start:stop, None].to(key.device)
            weights = weights.masked_fill_(absent, 0.0)
        sums[..., :reach] += weights.sum((2, 3))
    return sums
