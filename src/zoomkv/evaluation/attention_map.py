"""How far queries look: top keys, their median distance, and what is local or global by it.

The definitions of BeaconKV (arXiv 2609.04971), section 2.1. All of it works on the queries and
keys of one sequence without padding, where query t may read the keys 0 to t.
"""

from __future__ import annotations

import torch
from torch import Tensor

LOCAL, BETWEEN, GLOBAL = range(3)
KIND_NAMES = ("local", "between", "global")
MISSING = -1
"""Stands in the top keys of a query that can read fewer keys than were asked for."""

_SCORES_AT_ONCE = 2**24  # 64 MiB in fp32


def top_keys(query: Tensor, key: Tensor, count: int) -> Tensor:  # [H, T, D], [Hkv, T, D]
    """Positions of the keys that each query attends to most, int64 ``[H, T, K]``, best first.

    Works through the queries in chunks, so that no ``[H, T, T]`` is ever held. K is the smaller of
    ``count`` and T; a query at t < K has ``MISSING`` behind its t + 1 keys.

    Args:
        query: After RoPE; consecutive heads share a KV head.
        key: After RoPE.
        count: Keys of a query.
    """
    heads, length, width = query.shape
    count = min(count, length)
    found = torch.empty(heads, length, count, dtype=torch.long, device=query.device)
    grouped = query.float().view(key.shape[0], -1, length, width)
    columns = key.float().unsqueeze(1).transpose(-1, -2)  # [Hkv, 1, D, T]
    size = max(1, _SCORES_AT_ONCE // (heads * length))
    for start in range(0, length, size):
        end = min(start + size, length)
        readable = max(end, count)  # the first chunk may be narrower than K
        scores = grouped[:, :, start:end] @ columns[..., :readable]
        scores = scores.flatten(0, 1)  # [H, C, readable]
        future = torch.ones(scores.shape[1:], dtype=torch.bool, device=scores.device)
        top = scores.masked_fill_(future.triu(start + 1), -torch.inf).topk(count)
        found[:, start:end] = top.indices.masked_fill_(top.values == -torch.inf, MISSING)
    return found


def distances(keys: Tensor) -> Tensor:  # [..., T, K]
    """How far back each of the ``top_keys`` lies, t - j, or ``MISSING``."""
    position = torch.arange(keys.shape[-2], device=keys.device)[:, None]
    return torch.where(keys == MISSING, MISSING, position - keys)


def median_distance(distance: Tensor) -> Tensor:  # [..., T, K] -> fp32 [..., T]
    """The attention distance of each query: the median over those of its top keys that exist."""
    there = distance != MISSING
    ordered = distance.masked_fill(~there, torch.iinfo(distance.dtype).max).sort(-1).values
    number = there.sum(-1, keepdim=True)
    middle = torch.cat([(number - 1) // 2, number // 2], -1)
    return ordered.gather(-1, middle).float().mean(-1)


def kinds(median: Tensor, window: float, fraction: float) -> Tensor:  # [..., T] -> int8 [..., T]
    """``LOCAL``, ``GLOBAL`` or ``BETWEEN`` for each query.

    Args:
        median: Attention distances of the queries 0 to T - 1.
        window: A query that looks no further back than this is local.
        fraction: One that looks further back than that, and than this share of its own position,
            is global.
    """
    position = torch.arange(median.shape[-1], device=median.device)
    kind = torch.full_like(median, BETWEEN, dtype=torch.int8)
    kind[median <= window] = LOCAL
    kind[(median > window) & (median > fraction * position)] = GLOBAL
    return kind


def distance_histogram(
    distance: Tensor,  # [H, T, K]
    kind: Tensor,  # [H, T]
    width: int,
) -> Tensor:
    """Counts of the distances of all top keys of local and of global queries.

    Args:
        distance: As ``distances`` gives them.
        kind: Kinds of the queries.
        width: Distances 0 to width - 1 fall into the first bin, and so on.

    Returns:
        int64 ``[H, 2, bins]``, local before global; bins reach to distance T - 1.
    """
    heads, length, _ = distance.shape
    bins = -(-length // width)
    place = (distance // width).clamp_min(0)
    place += (
        bins * (2 * torch.arange(heads, device=kind.device)[:, None] + (kind == GLOBAL))[..., None]
    )
    counted = (distance != MISSING) & (kind != BETWEEN)[..., None]
    counts = torch.bincount(place[counted], minlength=heads * 2 * bins)
    return counts.view(heads, 2, bins)


def attention_rows(
    query: Tensor,  # [T, D]
    key: Tensor,  # [T, D]
    start: int,
    end: int,
    scaling: float,
) -> Tensor:
    """Attention weights of the queries ``start`` to ``end - 1`` of one head, fp32 ``[Q, end]``."""
    scores = query[start:end].float() @ key[:end].float().T * scaling
    future = torch.ones(scores.shape, dtype=torch.bool, device=scores.device).triu(start + 1)
    return scores.masked_fill(future, -torch.inf).softmax(-1)
