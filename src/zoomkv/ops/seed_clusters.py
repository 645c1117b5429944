"""Clusters of like keys around seeds, as many as a budget allows (SemantiCache, arXiv 2603.14303).

Within a chunk the first key that is in no cluster yet is a seed; it takes all later ones whose
cosine with it exceeds a threshold and that are in no cluster either; and so on.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

_HALVINGS = 8  # of the interval [-1, 1] in which a threshold is looked for


def seed_clusters(
    keys: Tensor,  # [B, h, R, D]
    free: Tensor,  # bool [B, h, R]
    chunk: Tensor,  # [B, h, R]
    count: Tensor,  # [B]
    target: Tensor,  # [B]
    reach: int,
) -> tuple[Tensor, Tensor]:  # [B, h, R], [B]
    """Says which rows to merge so that ``target`` rows remain in every head.

    The threshold is looked for by halving, for each batch row and head by itself. Where it leaves
    too few rows, those that fit their seeds worst stay for themselves, so that the number is met.

    Args:
        keys: Of all rows, in order.
        free: Rows that may be merged; the others are nobody's seed either.
        chunk: Number of each row's chunk, never falling; only rows of the same one are merged.
        count: Rows that there are; what stands behind them is ignored.
        target: Rows that are to remain.
        reach: How many rows a seed may stand before what it takes; larger chunks are not searched
            as a whole.

    Returns:
        For each row the row that it is merged into, itself if it stays; and how many stay: more
        than ``target`` if in some head not even a threshold below all cosines does.
    """
    rows = torch.arange(keys.shape[2], device=keys.device)
    free = free & (rows < count[:, None, None])
    # Rows of one chunk stand together, so this is how far the longest reaches.
    behind = (rows - torch.searchsorted(chunk, chunk)).where(free, 0)
    reach = max(1, min(reach, int(behind.max())))
    cosine = _banded(F.normalize(keys.float(), dim=-1), reach)
    joined = _behind(chunk, reach) == chunk[:, :, None]
    joined &= _behind(free, reach) & free[:, :, None]
    over = (count - target).clamp(min=0).minimum(_taken(joined).sum(-1).amin(1))[:, None]

    low = cosine.new_full(keys.shape[:2], -1.01)
    high = torch.ones_like(low)
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        enough = _taken(joined & (cosine > middle[..., None, None])).sum(-1) >= over
        low, high = low.where(~enough, middle), high.where(enough, middle)
    near = joined & (cosine > low[..., None, None])
    taken = _taken(near)

    by = near & _behind(~taken, reach)
    first = by.view(torch.uint8).argmax(2, keepdim=True)  # seeds take in order
    fit = cosine.gather(2, first)[:, :, 0].masked_fill(~taken, torch.inf)
    spare = (taken.sum(-1) - over)[..., None]
    worst = torch.zeros_like(taken).scatter_(
        -1, fit.argsort(dim=-1, stable=True), (rows < spare).expand_as(taken)
    )
    seed = rows - (reach - first[:, :, 0])
    return torch.where(taken & ~worst, seed, rows), count - over[:, 0]


def _taken(near: Tensor) -> Tensor:  # bool [B, h, W, R] -> bool [B, h, R]
    """Rows that a seed takes, if it takes all that are near.

    A row is a seed unless an earlier seed is near; so it is known once the earlier ones are.
    """
    reach = near.shape[2]
    seed = ~_any(near)
    taken = torch.zeros_like(seed)
    while bool((unknown := ~(seed | taken)).any()):
        taken = taken | unknown & _any(near & _behind(seed, reach))
        waits = _any(near & _behind(~(seed | taken), reach))
        seed = seed | ~(taken | waits)
    return taken


def _any(x: Tensor) -> Tensor:  # bool [B, h, W, R] -> bool [B, h, R]
    """Like ``x.any(2)``, and several times as quick."""
    return x.view(torch.uint8).amax(2).view(torch.bool)


def _behind(x: Tensor, reach: int) -> Tensor:  # [B, h, R] -> view [B, h, W, R]
    """What stands ``W`` to 1 rows behind each row, zeros before the first."""
    return F.pad(x, (reach, -1)).unfold(-1, x.shape[-1], 1)


def _banded(unit: Tensor, reach: int) -> Tensor:  # [B, h, R, D] -> [B, h, W, R]
    """Products of each row with those behind it, zeros before the first."""
    batch, heads, rows, width = unit.shape
    blocks = -(-rows // reach)
    padded = F.pad(unit, (0, 0, reach, blocks * reach - rows))
    both = padded.unfold(2, 2 * reach, reach)  # each block after the one before: [.., D, 2 W]
    product = padded[:, :, reach:].view(batch, heads, blocks, reach, width) @ both
    # Row i of a block begins its window i columns further to the right than row 0.
    step = product.stride()
    band = product.as_strided(
        (batch, heads, blocks, reach, reach), (*step[:3], step[3] + step[4], step[4])
    )
    band = band.reshape(batch, heads, blocks * reach, reach)[:, :, :rows]
    return band.transpose(2, 3).contiguous()
