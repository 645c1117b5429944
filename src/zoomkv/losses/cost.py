"""What open spans and kept components cost (SeKV, arXiv 2606.31145, L_cost).

The paper's sums over queries, layers, heads, spans and ranks, each divided by the most that it
could be. So both are shares between 0 and 1 at every length of context and size of model; sums over
millions of gates would drown the other losses as soon as gradients are clipped.
"""

from __future__ import annotations

import torch
from torch import Tensor


def zoom_cost(opens: Tensor, valid: Tensor) -> Tensor:  # [..., S], bool [..., S] -> scalar
    """The share of spans that are opened, over all queries.

    Args:
        opens: Zeros and ones, with the straight-through gradient: through it this cost raises
            thresholds and lowers scores.
        valid: Entries that are spans which the query could open; broadcasts.

    Returns:
        In fp32 (fp64 for fp64 input); 0 if nothing is valid.
    """
    return _share(opens, valid)


def rank_cost(gates: Tensor, available: Tensor) -> Tensor:  # [..., R], bool [..., R] -> scalar
    """The rank that gates retain, as a share of the rank that there is.

    Args:
        gates: Of each component, of keys and values alike.
        available: Components that exist (sigma > 0).

    Returns:
        In fp32 (fp64 for fp64 input); 0 if there is no component.
    """
    return _share(gates, available)


def cost(
    opens: Tensor, valid: Tensor, gates: Tensor, available: Tensor, beta: float = 0.1
) -> Tensor:  # scalar
    """``zoom_cost`` plus ``beta`` times ``rank_cost``."""
    return zoom_cost(opens, valid) + beta * rank_cost(gates, available)


def _share(x: Tensor, counts: Tensor) -> Tensor:
    counts = counts.expand_as(x)
    x = x.to(torch.promote_types(x.dtype, torch.float32))
    return x.masked_fill(~counts, 0).sum() / counts.sum().clamp(min=1)
