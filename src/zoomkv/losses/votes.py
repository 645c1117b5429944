"""How far the heads are from voting for the paragraph that is needed."""

from __future__ import annotations

import torch
from torch import Tensor


def vote_loss(
    queries: Tensor,  # [L, n, H, D]
    mean_keys: Tensor,  # [L, Hkv, S, D]
    candidates: Tensor,  # bool [n, S]
    needed: Tensor,  # [n]
) -> tuple[Tensor, Tensor]:  # [n], [n]
    """Cross-entropy of each head's choice among the summaries, mean over layers and heads.

    A head votes by the product of its query with the mean keys of the summaries (ZoomR section
    3.3). Most heads rate by distance, so the newest summaries win whatever is asked for; this loss
    is zero once all heads prefer the needed one.

    Args:
        queries: After RoPE, at the tokens where a choice is made.
        mean_keys: Of each summary's interior, after RoPE.
        candidates: Summaries that each query may vote for.
        needed: The one that it should vote for.

    Returns:
        Nats, in fp32, for each query; and the share of heads whose first vote is right.
    """
    layers, count, heads, width = queries.shape
    kv_heads = mean_keys.shape[1]
    with torch.autocast(queries.device.type, enabled=False):
        grouped = queries.float().view(layers, count, kv_heads, heads // kv_heads, width)
        scores = torch.einsum("lngxd,lgsd->lngxs", grouped, mean_keys.float()) / width**0.5
        scores = scores.masked_fill(~candidates[None, :, None, None], -torch.inf)
        target = needed[None, :, None, None, None].expand(*scores.shape[:-1], 1)
        nll = -scores.log_softmax(-1).gather(-1, target).squeeze(-1)
        first = (scores.argmax(-1) == target.squeeze(-1)).float()
    return nll.mean((0, 2, 3)), first.mean((0, 2, 3))
