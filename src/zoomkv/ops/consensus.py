"""How all heads of all layers agree on the paragraphs to read in full (ZoomR, section 3.3).

Every query head votes for the k summaries whose mean key it likes best. The c paragraphs with
the most votes are read in full, other voted ones as their summaries, the rest not at all.
"""

from typing import Literal

import torch
from torch import Tensor

VoteHeads = Literal["query", "kv_mean"]


def vote(
    queries: Tensor,  # [L, B, Hkv, G, D]
    mean_keys: Tensor,  # [L, B, Hkv, N, D]
    count: Tensor,  # [B]
    k: int,
    vote_heads: VoteHeads = "query",
) -> Tensor:  # int32 [B, N]
    """Counts the votes of all layers and heads in one product.

    Scores are raw dot products in fp32, whatever autocast says; equal scores prefer the more
    recent summary, so the outcome does not depend on a sort's whim.

    Args:
        queries: The boundary token's queries, after RoPE.
        mean_keys: Mean key of each summary's interior.
        count: Summaries that each row has; entries beyond get no votes.
        k: Votes of each head; a row with fewer summaries gives one to each.
        vote_heads: ``query``: each query head votes. ``kv_mean``: the mean query of each KV
            group does.

    Returns:
        Votes; a row sums to L * H * min(k, count), or L * Hkv * min(k, count) for ``kv_mean``.
    """
    _, batch, _, _, _ = queries.shape
    size = mean_keys.shape[3]
    with torch.autocast(queries.device.type, enabled=False):
        queries = queries.float()
        if vote_heads == "kv_mean":
            queries = queries.mean(dim=3, keepdim=True)
        scores = queries @ mean_keys.float().transpose(-1, -2)  # [L, B, Hkv, G, N]
    index = torch.arange(size, device=scores.device)
    exists = index < count.to(scores.device)[:, None]  # [B, N]
    key = torch.where(exists[:, None, None], _order(scores) + index, torch.iinfo(torch.int64).min)
    chosen = key.topk(min(k, size)).indices.transpose(0, 1).reshape(batch, -1)  # [B, L*H*k]
    votes = torch.zeros(batch, size, dtype=torch.int32, device=scores.device)
    votes.scatter_add_(1, chosen, torch.ones_like(chosen, dtype=torch.int32))
    return votes.masked_fill(~exists, 0)


def choose(votes: Tensor, count: Tensor, c: int) -> tuple[Tensor, Tensor]:  # [B, N], [B]
    """Splits the voted paragraphs into those read in full and those read as summaries.

    Args:
        votes: Votes of each summary.
        count: Summaries that each row has.
        c: Paragraphs to read in full, at most; 0 reads summaries only.

    Returns:
        ``zoomed`` and ``summarised``, bool ``[B, N]``: the top c by votes (equal votes prefer
        the more recent), and the other voted ones.
    """
    size = votes.shape[1]
    index = torch.arange(size, device=votes.device)
    voted = (votes > 0) & (index < count.to(votes.device)[:, None])
    key = torch.where(voted, votes.long() * (size + 1) + index, -1)
    top = key.topk(min(c, size)).indices
    zoomed = torch.zeros_like(voted).scatter_(1, top, True) & voted
    return zoomed, voted & ~zoomed


def agreeability(votes: Tensor, zoomed: Tensor) -> Tensor:  # [B, N], bool [B, N] -> [B]
    """Share of the votes that went to the paragraphs read in full (section 4.3 of the paper).

    It is 1 for any row with at most c summaries, which says nothing, and NaN for a row without
    votes: report it for rows with more than c summaries only.
    """
    return (votes * zoomed).sum(1) / votes.sum(1)


def memory_saving(
    prompt: int, generated: int, zoomed: int, paragraph: int, summary: int, voted: int, window: int
) -> float:
    """Tokens of the full cache over tokens that ZoomR keeps on the device (section 3.5).

    The paper's arithmetic: it leaves out the paragraph being written and the tokens since the
    last boundary.

    Args:
        prompt: Tokens of the prompt, N_p.
        generated: Tokens generated, N_g.
        zoomed: Paragraphs read in full, c.
        paragraph: Mean tokens of a paragraph, L_R.
        summary: Mean tokens of a summary, L_S.
        voted: Summaries with a vote, the zoomed ones included.
        window: Recent tokens that are kept, N_w.
    """
    kept = prompt + zoomed * paragraph + (voted - zoomed) * summary + window
    return (prompt + generated) / kept


def _order(scores: Tensor) -> Tensor:  # fp32 -> int64, low 32 bits free
    """Integers in the order of the scores; adding an index below 2**32 breaks every tie."""
    bits = (scores + 0.0).view(torch.int32)  # + 0.0 turns -0.0 into 0.0
    # The bits of a float order like an integer, but backwards among negative numbers.
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).long() << 32
