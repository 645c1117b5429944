"""Reading spans at one of two resolutions, so that the choice can be learnt (SeKV, section 3.3).

One softmax runs over exact tokens, the tokens of zoomed spans and the coarse entries of the others
(arXiv 2606.31145). A decision z multiplies exponentials: those of a span's tokens by z, that of its
coarse entry by (1 - z)|S|. With z of 0 or 1, what is not read has no weight at all; and the
derivative with respect to z is there for both, whichever of them is read.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from zoomkv.spans.surprisal import Spans

_FINITE = 60.0  # nats: sums of such exponentials are still numbers in fp32


def soft_read(
    query: Tensor,  # [B, H, Q, D]
    tokens: tuple[Tensor, Tensor],  # [B, Hkv, T, D]
    coarse: tuple[Tensor, Tensor],  # [B, Hkv, S, D]
    own: tuple[Tensor, Tensor],  # [B, Hkv, Q, D]
    spans: Spans,
    opens: Tensor,  # [B, H, Q, S]
    scaling: float,
    ceiling: float = 0.0,
) -> Tensor:  # [B, H, Q, D]
    """Attention of a continuation over the spans of a context and over itself.

    Autograd gives the derivative of the mixture. An entry that is not read may have an exponential
    of p times the sum of all that are: opening it would move the output by p / (1 + p) of the way
    to its value, while the derivative says p. Where p exceeds exp(``ceiling``), the derivative is
    taken as if it did not; at 0 it is never more than twice what opening one token would do.

    Memory for the backward pass is that of the arguments and the result; weights are made again.

    Args:
        query: After RoPE; consecutive heads share a KV head.
        tokens: Keys and values of the context by position, those in spans as rebuilt.
        coarse: Mean key and value of each span.
        own: Keys and values of the continuation, which reads itself causally.
        spans: Of the context.
        opens: 1 to read a span's tokens, 0 to read its coarse entry, for each query head and row.
            Numbers between mix both (with a derivative that is exact for a ``ceiling`` of ``inf``
            alone). Entries that are no span may hold anything from 0 to 1.
        scaling: Factor on the products of queries and keys.
        ceiling: Nats. ``inf`` for the exact derivative, as far as fp32 has numbers for it (60).

    Returns:
        In fp32 (fp64 for fp64 queries), whatever autocast says.

    Raises:
        ValueError: Opens of another shape than heads, rows and spans have.
    """
    batch, heads, count, _ = query.shape
    kv_heads, amount = tokens[0].shape[1], spans.size.shape[1]
    if opens.shape != (batch, heads, count, amount):
        raise ValueError(
            f"opens of {list(opens.shape)}; give one for each head, row and span, "
            f"{[batch, heads, count, amount]}"
        )
    wide = torch.promote_types(query.dtype, torch.float32)
    # Rows of weights [G * Q]: opened, not opened, always, never, and one for each own token.
    opened = opens.to(wide).unflatten(1, (kv_heads, -1)).permute(0, 1, 4, 2, 3).flatten(3)
    fixed = opened.new_ones(2 + count, count)
    fixed[1] = 0
    fixed[2:].triu_()  # its own token j is read by rows from j on
    fixed = fixed.repeat(1, heads // kv_heads).expand(batch, kv_heads, -1, -1)
    closed = (1 - opened) * spans.size[:, None, :, None]
    weights = torch.cat([opened, closed, fixed], dim=2)  # [B, Hkv, 2 S + 2 + Q, G * Q]

    always, never = 2 * amount, 2 * amount + 1
    place = torch.arange(spans.number.shape[1], device=query.device)
    other = torch.where(place < spans.length[:, None], always, never)
    of_token = spans.number.where(spans.number >= 0, other)
    rest = torch.arange(amount + count, device=query.device) + amount
    rest[amount:] += 2  # behind always and never
    of = torch.cat([of_token, rest.expand(batch, -1)], dim=1)  # [B, T + S + Q]

    keys, values = (
        torch.cat([x.to(wide) for x in parts], dim=2)
        for parts in zip(tokens, coarse, own, strict=True)
    )
    asked = (query.to(wide) * scaling).reshape(batch, kv_heads, -1, query.shape[3])
    out = _Mixture.apply(asked, keys, values, weights, of, min(ceiling, _FINITE))
    return out.view(query.shape)


class _Mixture(torch.autograd.Function):
    """sum w exp(q.k) v / sum w exp(q.k): entries come first, so that their sums are sums of rows.

    Queries ``[B, Hkv, R, D]``, keys and values ``[B, Hkv, N, D]``, weights ``[B, Hkv, M, R]`` and
    which of them each entry has, ``[B, N]``.
    """

    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        keys: Tensor,
        values: Tensor,
        weights: Tensor,
        of: Tensor,
        ceiling: float,
    ) -> Tensor:
        batch, heads, kinds = weights.shape[:3]
        first = torch.arange(batch * heads, device=of.device).view(batch, heads, 1) * kinds
        flat = (first + of[:, None]).flatten()
        with torch.autocast(query.device.type, enabled=False):
            logits = (keys @ query.mT).add_(_each(weights.log(), flat))  # [B, Hkv, N, R]
            total = logits.logsumexp(2, keepdim=True)
            out = logits.sub_(total).exp_().mT @ values
        ctx.save_for_backward(query, keys, values, weights, flat, total, out)
        ctx.ceiling = ceiling
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        query, keys, values, weights, flat, total, out = ctx.saved_tensors
        with torch.autocast(query.device.type, enabled=False):
            share = (keys @ query.mT).sub_(total).clamp_(max=ctx.ceiling).exp_()
            # How much the loss would change with each weight.
            change = (values @ gradient.mT).sub_((gradient * out).sum(-1)[:, :, None])
            change.mul_(share)
            of_weights = torch.zeros_like(weights).flatten(0, 2)
            of_weights.index_add_(0, flat, change.flatten(0, 2))
            own = _each(weights, flat)
            of_values = share.mul_(own) @ gradient
            of_keys = change.mul_(own) @ query
            of_query = change.mT @ keys
        return of_query, of_keys, of_values, of_weights.view_as(weights), None, None


def _each(weights: Tensor, flat: Tensor) -> Tensor:  # [B, Hkv, M, R], [B * Hkv * N]
    """The weights of each entry, ``[B, Hkv, N, R]``."""
    batch, heads, _, rows = weights.shape
    return weights.flatten(0, 2)[flat].view(batch, heads, -1, rows)
