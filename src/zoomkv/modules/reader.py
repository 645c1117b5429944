"""One softmax over rows of several kinds (SeKV, arXiv 2606.31145, section 3.3).

Exact rows, rows fetched from the host and coarse entries that stand for whole spans lie in tensors
of their own; putting them together would copy them in every step, so only their logits are.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(slots=True)
class Part:
    """Some of what the queries read."""

    keys: Tensor
    """``[B, Hkv, N, D]``"""
    values: Tensor
    """``[B, Hkv, N, D]``"""
    bias: Tensor | None = None
    """Added to logits: -inf for what is not read, log |S| for what stands for a span S. Broadcasts
    to ``[B, Hkv, G, Q, N]``; bool: True is read."""
    key_scale: Tensor | None = None
    """Factor on each key, fp32 ``[B, Hkv, N]``, if they are stored as 8-bit numbers."""
    value_scale: Tensor | None = None
    """The same on each value."""

    def logits(self, query: Tensor) -> Tensor:  # fp32 [B, Hkv, G, Q, D] -> [B, Hkv, G, Q, N]
        """Products of scaled queries with the keys, bias included."""
        batch, heads, group, rows, width = query.shape
        flat = query.reshape(batch, heads, group * rows, width)
        out = (flat @ self.keys.float().mT).view(batch, heads, group, rows, -1)
        if self.key_scale is not None:
            out = out * self.key_scale[:, :, None, None]
        if self.bias is None:
            return out
        if self.bias.dtype == torch.bool:
            return out.masked_fill(~self.bias, -torch.inf)
        return out + self.bias

    def weighted(self, weights: Tensor) -> Tensor:  # fp32 [B, Hkv, G, Q, N] -> [B, Hkv, G, Q, D]
        """Sums of the values."""
        if self.value_scale is not None:
            weights = weights * self.value_scale[:, :, None, None]
        batch, heads, group, rows, count = weights.shape
        flat = weights.reshape(batch, heads, group * rows, count)
        out = flat @ self.values.float()
        return out.view(batch, heads, group, rows, -1)


def combine(parts: Sequence[Part], logits: Sequence[Tensor]) -> Tensor:
    """Attention over several parts at once.

    Args:
        parts: Of which at least one row is read by each query.
        logits: Of each part, from ``Part.logits``.

    Returns:
        fp32 ``[B, Hkv, G, Q, D]``.
    """
    weights = torch.cat(list(logits), dim=-1).softmax(-1)
    pieces = weights.split([piece.shape[-1] for piece in logits], dim=-1)
    out = parts[0].weighted(pieces[0])
    for part, piece in zip(parts[1:], pieces[1:], strict=True):
        out += part.weighted(piece)
    return out


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
        keys, values = self.keys.float(), self.values.float()
        if self.key_scale is None or self.value_scale is None:
            return keys, values
        return keys * self.key_scale[..., None], values * self.value_scale[..., None]

    def part(self, bias: Tensor) -> Part:
        """As the reader takes them."""
        return Part(self.keys, self.values, bias, self.key_scale, self.value_scale)

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
