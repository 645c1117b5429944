"""How well an estimate of logits tells which tokens a head looks at."""

import torch
from torch import Tensor


def candidate_loss(
    estimate: Tensor,  # [B, Hkv, G, Q, T]
    true: Tensor,  # [B, Hkv, G, Q, T]
    present: Tensor,  # bool [B, T]
    others: Tensor,  # [B, Hkv, G, Q, N]
) -> Tensor:  # scalar
    """Divergence of the estimate's softmax over some tokens from a head's attention on them.

    Args:
        estimate: Estimated logits; a constant added for a query changes nothing.
        true: The logits; no gradient goes there.
        present: Which tokens are compared.
        others: Logits of all else that the query sees, -inf for what it doesn't.

    Returns:
        Mean over queries and heads of the Kullback-Leibler divergence (nats), each weighted by the
        share of its attention that is on these tokens.
    """
    inside = present[:, None, None, None]
    true = true.detach().float().masked_fill(~inside, -torch.inf)
    total = torch.logaddexp(true.logsumexp(-1), others.float().logsumexp(-1))
    share = (true - total[..., None]).exp()
    own = true.log_softmax(-1).masked_fill(~inside, 0)
    guess = estimate.float().masked_fill(~inside, -torch.inf).log_softmax(-1)
    return (share * (own - guess.masked_fill(~inside, 0))).sum(-1).mean()


@torch.no_grad()
def captured(
    estimate: Tensor,  # [B, Hkv, G, Q, T]
    true: Tensor,  # [B, Hkv, G, Q, T]
    present: Tensor,  # bool [B, T]
    others: Tensor,  # [B, Hkv, G, Q, N]
    count: int,
) -> Tensor:  # scalar
    """The attention that a choice by the estimate has, as a share of what the best one would have.

    The heads of a group fetch together: ``count`` tokens, those of which one of them thinks most.

    Args:
        estimate: As for ``candidate_loss``.
        true: As for ``candidate_loss``.
        present: As for ``candidate_loss``.
        others: As for ``candidate_loss``.
        count: Tokens that are fetched.
    """
    inside = present[:, None, None, None]
    true = true.float().masked_fill(~inside, -torch.inf)
    total = torch.logaddexp(true.logsumexp(-1), others.float().logsumexp(-1))
    share = (true - total[..., None]).exp()  # [B, Hkv, G, Q, T]
    weight = share.sum(-1, keepdim=True)
    guess = estimate.float().masked_fill(~inside, -torch.inf).softmax(-1) * weight
    count = min(count, share.shape[-1])
    got, best = (
        share.gather(
            -1, x.amax(2, keepdim=True).topk(count, -1).indices.expand(*share.shape[:-1], -1)
        ).sum()
        for x in (guess, share)
    )
    return got / best.clamp(min=1e-30)
