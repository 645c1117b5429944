"""One softmax over rows of several kinds (SeKV, arXiv 2606.31145, section 3.3).

Exact rows, rows fetched from the host and coarse entries that stand for whole spans lie in tensors
of their own. They are few, so a step puts them side by side and attends once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass(slots=True)
class Part:
    """Some of what the queries read."""

    keys: Tensor
    """``[B, Hkv, N, D]``"""
    values: Tensor
    """``[B, Hkv, N, D]``"""
    bias: Tensor | None = None
    """Added to logits: -inf for what is not read, log |S| for what stands for a span S. Its five
    dimensions broadcast to ``[B, Hkv, G, Q, N]``; bool: True is read."""

    def logits(self, query: Tensor) -> Tensor:  # fp32 [B, Hkv, G, Q, D] -> [B, Hkv, G, Q, N]
        """Products of scaled queries with the keys, bias included."""
        batch, heads, group, rows, width = query.shape
        flat = query.reshape(batch, heads, group * rows, width)
        out = (flat @ self.keys.float().mT).view(batch, heads, group, rows, -1)
        return out if self.bias is None else out + self.addends()

    def addends(self) -> Tensor:
        """The bias as fp32 numbers."""
        if self.bias is None:
            return self.keys.new_zeros(1, 1, 1, 1, self.keys.shape[2], dtype=torch.float32)
        if self.bias.dtype == torch.bool:
            return torch.where(self.bias, 0.0, -torch.inf)
        return self.bias.float()


def read(query: Tensor, parts: Sequence[Part], scaling: float) -> Tensor:
    """Attention over several parts at once.

    Args:
        query: After RoPE ``[B, Hkv, G, Q, D]``; rows and biases are read in its dtype (in bf16, an
            entry counts for its tokens to within 2 %).
        parts: Of which at least one row is read by each query.
        scaling: Factor on the products of queries and keys.

    Returns:
        ``[B, Hkv, G, Q, D]``.
    """
    batch, heads, group, rows, width = query.shape
    keys = torch.cat([part.keys.to(query.dtype) for part in parts], dim=2)
    values = torch.cat([part.values.to(query.dtype) for part in parts], dim=2)
    mask = None
    if any(part.bias is not None for part in parts):
        added = [part.addends() for part in parts]
        lead = torch.broadcast_shapes(*(x.shape[:4] for x in added))
        if rows > 1:
            lead = (*lead[:2], group, rows)
        mask = torch.cat([x.expand(*lead, -1) for x in added], dim=-1).flatten(2, 3)
        mask = mask.to(query.dtype)
    flat = query.reshape(batch, heads, group * rows, width)
    out = F.scaled_dot_product_attention(flat, keys, values, attn_mask=mask, scale=scaling)
    return out.view(batch, heads, group, rows, -1)


@dataclass(slots=True)
class Entries:
    """Coarse entries of spans, one for each span and KV head, in 8 bits or as they are."""

    keys: Tensor
    """``[B, Hkv, S, D]``"""
    values: Tensor
    key_scale: Tensor | None
    """fp32 ``[B, Hkv, S]``; None: not quantised."""
    value_scale: Tensor | None

    @classmethod
    def of(cls, keys: Tensor, values: Tensor, dtype: torch.dtype | None) -> Entries:
        """Stores fp32 entries in a dtype; None: in 8 bits, with a scale for each."""
        if dtype is not None:
            return cls(keys.to(dtype), values.to(dtype), None, None)
        (keys, key_scale), (values, value_scale) = _eighth(keys), _eighth(values)
        return cls(keys, values, key_scale, value_scale)

    def plain(self) -> tuple[Tensor, Tensor]:
        """Keys and values in fp32."""
        if self.key_scale is None or self.value_scale is None:
            return self.keys.float(), self.values.float()
        return self.keys * self.key_scale[..., None], self.values * self.value_scale[..., None]

    def part(self, bias: Tensor) -> Part:
        """As the reader takes them."""
        return Part(*self.plain(), bias)

    def tensors(self) -> list[Tensor]:
        """All that is stored."""
        every = (self.keys, self.values, self.key_scale, self.value_scale)
        return [tensor for tensor in every if tensor is not None]

    def select(self, rows: Tensor) -> Entries:
        """The given batch rows."""
        rows = rows.to(self.keys.device)
        every = (self.keys, self.values, self.key_scale, self.value_scale)
        return Entries(*(None if x is None else x[rows] for x in every))  # type: ignore[arg-type]


def _eighth(x: Tensor) -> tuple[Tensor, Tensor]:
    scale = (x.abs().amax(-1) / 127).clamp(min=1e-12)
    return (x / scale[..., None]).round().to(torch.int8), scale
