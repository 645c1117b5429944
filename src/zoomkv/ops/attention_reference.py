"""Attention as one reads it on paper: slow, in fp32, what faster forms are tested against."""

import torch
from torch import Tensor


def attention_reference(
    query: Tensor,  # [B, H, Q, D]
    key: Tensor,  # [B, Hkv, T, D]
    value: Tensor,  # [B, Hkv, T, D]
    readable: Tensor | None = None,  # bool, broadcasts to [B, Hkv, Q, T]
    bias: Tensor | None = None,  # broadcasts to [B, Hkv, Q, T]
    scale: float | None = None,
) -> Tensor:  # fp32 [B, H, Q, D]
    """Softmax attention, one head after the other, with a mask over rows.

    Args:
        query: Queries; consecutive heads share a KV head.
        key: Keys.
        value: Values.
        readable: Rows that each query may read; all by default.
        bias: Added to the scores.
        scale: Factor on the scores; 1 / sqrt(D) by default.

    Returns:
        The output in fp32; zeros for a query that may read nothing.
    """
    batch, heads, length, width = query.shape
    kv_heads, rows = key.shape[1:3]
    shape = (batch, kv_heads, length, rows)
    everything = torch.ones(shape, dtype=torch.bool, device=query.device)
    readable = everything if readable is None else readable.expand(shape)
    out = torch.zeros(batch, heads, length, width, device=query.device)
    with torch.autocast(query.device.type, enabled=False):
        for head in range(heads):
            group = head * kv_heads // heads
            scores = query[:, head].float() @ key[:, group].float().transpose(-1, -2)
            scores = scores * (width**-0.5 if scale is None else scale)
            if bias is not None:
                scores = scores + bias.float().expand(shape)[:, group]
            scores = scores.masked_fill(~readable[:, group], float("-inf"))
            weights = scores.softmax(-1).nan_to_num(0.0)  # 0 / 0 where nothing is readable
            out[:, head] = weights @ value[:, group].float()
    return out
