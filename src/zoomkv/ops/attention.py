"""Attention of grouped query heads over shared keys and values."""

import torch
import torch.nn.functional as F
from torch import Tensor


def grouped_attention(
    query: Tensor,  # [B, H, Q, D]
    key: Tensor,  # [B, Hkv, T, D]
    value: Tensor,  # [B, Hkv, T, D]
    mask: Tensor | None = None,  # [B, 1 or Hkv, Q, T]
    scale: float | None = None,
    causal: bool = False,
) -> Tensor:  # [B, H, Q, D]
    """Exact attention where H / Hkv query heads share a KV head; nothing is repeated at Q = 1.

    Args:
        query: Queries; consecutive heads share a KV head.
        key: Keys of all rows that may be read.
        value: Values of the same rows.
        mask: Bool (True is readable) or additive, for each row or each KV head. A query that
            may read nothing gives zeros, never NaN.
        scale: Factor on the scores; 1 / sqrt(D) by default.
        causal: The last query stands at the last key, the ones before it one key earlier each.

    Returns:
        Attention output in the query's dtype.
    """
    batch, heads, length, width = query.shape
    kv_heads, rows = key.shape[1:3]
    # Under autocast rotary keys come as fp32 beside bf16 values; SDPA wants one dtype.
    key, value = key.to(query.dtype), value.to(query.dtype)
    if length == 1:
        # The heads of a group become the queries of one head.
        grouped = query.reshape(batch, kv_heads, heads // kv_heads, width)
        out = F.scaled_dot_product_attention(grouped, key, value, attn_mask=mask, scale=scale)
        return out.reshape(batch, heads, 1, width).to(query.dtype)

    square = causal and mask is None and length == rows
    if causal and not square:
        earlier = torch.ones(length, rows, dtype=torch.bool, device=query.device)
        mask = _restrict(mask, earlier.tril(rows - length))
    if mask is not None and mask.dim() == 4 and mask.shape[1] not in (1, heads):
        mask = mask.repeat_interleave(heads // kv_heads, dim=1)
    out = F.scaled_dot_product_attention(
        query, key, value, attn_mask=mask, is_causal=square, scale=scale, enable_gqa=True
    )
    return out.to(query.dtype)


def attention_weights(
    query: Tensor,  # [B, H, 1, D]
    key: Tensor,  # [B, Hkv, T, D]
    value: Tensor,  # [B, Hkv, T, D]
    mask: Tensor | None = None,  # bool [B, 1 or Hkv, 1, T]
    scale: float | None = None,
) -> tuple[Tensor, Tensor]:  # [B, H, 1, D], fp32 [B, Hkv, G, T]
    """Attention of one query, and its weights: for what needs both, at the price of one.

    Products are in the query's dtype, as in ``grouped_attention``, the softmax in fp32.

    Args:
        query: As in ``grouped_attention``, and so are the others.
        key: Keys of all rows that may be read.
        value: Values of the same rows.
        mask: What is read, something for each query; None: everything.
        scale: Factor on the scores; 1 / sqrt(D) by default.
    """
    batch, heads, _, width = query.shape
    kv_heads = key.shape[1]
    key, value = key.to(query.dtype), value.to(query.dtype)
    scale = width**-0.5 if scale is None else scale
    grouped = (query * scale).reshape(batch, kv_heads, heads // kv_heads, width)
    scores = grouped @ key.transpose(-1, -2)
    if mask is not None:
        scores.masked_fill_(~mask, -torch.inf)
    weights = scores.softmax(-1, dtype=torch.float32)
    output = weights.to(value.dtype) @ value
    return output.reshape(batch, heads, 1, width), weights


def _restrict(mask: Tensor | None, allowed: Tensor) -> Tensor:
    """Joins masks without adding two large negatives, which overflows in half precision."""
    if mask is None:
        return allowed
    if mask.dtype == torch.bool:
        return mask & allowed
    return mask.masked_fill(~allowed, float("-inf"))
