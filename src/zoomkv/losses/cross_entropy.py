"""Next-token cross-entropy that never holds all logits of a long batch at once."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint


def token_nll(
    hidden: Tensor,  # [B, T, hidden]
    labels: Tensor,  # [B, T]
    head: Callable[[Tensor], Tensor],
    ignore: int = -100,
    chunk: int = 4096,
) -> tuple[Tensor, Tensor]:
    """Negative log-likelihood of each labelled token, from the hidden state before it.

    Only labelled positions pass through the head. Beyond ``chunk`` of them, logits are made piece
    by piece and again in the backward pass, so memory is ``chunk`` x vocabulary, not T x V.

    Args:
        hidden: The decoder's last hidden states.
        labels: Ids to predict, aligned with the input (they are shifted here).
        head: The output projection, ``[N, hidden] -> [N, V]``.
        ignore: Label of positions that are not learnt.
        chunk: Labelled tokens whose logits are held together.

    Returns:
        ``(nll, where)``: nats ``[N]`` in fp32, and the flat indices ``[N]`` into ``[B, T]`` of the
        tokens that they belong to.
    """
    wanted = labels.clone()
    wanted[:, 0] = ignore
    where = (wanted.flatten() != ignore).nonzero().squeeze(1)
    # Index -1 of the flat view is never read: no label stands in the first column.
    states = hidden.flatten(0, 1)[where - 1]
    targets = wanted.flatten()[where]

    def nll(part: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(head(part).float(), target, reduction="none")

    if len(where) <= chunk:
        return nll(states, targets), where
    parts = [
        checkpoint(nll, part, target, use_reentrant=False)
        for part, target in zip(states.split(chunk), targets.split(chunk), strict=True)
    ]
    return torch.cat(parts), where
