"""Clusters of like keys around seeds, as many as a budget allows (SemantiCache, arXiv 2603.14303).

Within a chunk the first key that is in no cluster yet is a seed; it takes all later ones whose
cosine with it exceeds a threshold and that are in no cluster either; and so on.
"""

from collections.abc import Iterator
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor

_WORD = 64  # bits
_BELOW = -1.01  # all cosines
_TIE = 1e-4  # equal pairs of tokens, equally far apart, have cosines that only rounding tells apart
_HALVINGS = 2  # of the interval in which a threshold is looked for
_SPREAD = 3  # so many times the rows that are to go are near enough at its lower end


def seed_clusters(
    keys: Tensor,  # [B, h, R, D]
    free: Tensor,  # bool [B, h, R]
    chunk: Tensor,  # [B, h, R]
    count: Tensor,  # [B]
    target: Tensor,  # [B]
    reach: int,
) -> tuple[Tensor, Tensor]:  # [B, h, R], [B]
    """Says which rows to merge so that ``target`` rows remain in every head.

    The threshold is looked for by halving, for each batch row and head by itself, between the one
    that as many rows pass as are to go, and the one that three times as many do. Where it leaves
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
    same = _behind(chunk, reach) == chunk[..., None]
    same &= _behind(free, reach) & free[..., None]
    cosine = cosine.masked_fill_(~same, -torch.inf)
    # No more rows are taken than have an earlier one that is nearer than the threshold.
    wanted = (count - target).clamp(min=0)[:, None]
    nearest = cosine.amax(-1).sort(-1, descending=True).values.clamp(min=_BELOW)
    low, high = (nearest.gather(-1, rank) - _TIE for rank in _ranks(wanted, nearest))
    taken = _taken(cosine > low[..., None])
    if bool((taken.sum(-1) < wanted).any()):
        low = low.where(taken.sum(-1, keepdim=True) >= wanted[..., None], _BELOW)
        taken = _taken(cosine > low[..., None])
    over = wanted.minimum(taken.sum(-1).amin(1, keepdim=True))
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        found = _taken(cosine > middle[..., None])
        enough = found.sum(-1, keepdim=True) >= over[..., None]
        low, high = middle.where(enough, low), high.where(enough, middle)
        taken = found.where(enough, taken)
    near = cosine > low[..., None]

    by = near & _behind(~taken, reach)
    first = by.view(torch.uint8).argmax(-1, keepdim=True)  # seeds take in order
    fit = (cosine.gather(-1, first)[..., 0] / _TIE).round().masked_fill(~taken, torch.inf)
    spare = (taken.sum(-1) - over)[..., None]
    worst = torch.zeros_like(taken).scatter_(
        -1, fit.argsort(dim=-1, stable=True), (rows < spare).expand_as(taken)
    )
    seed = rows - (reach - first[..., 0])
    return torch.where(taken & ~worst, seed, rows), count - over[:, 0]


def _ranks(wanted: Tensor, nearest: Tensor) -> Iterator[Tensor]:  # [B, 1], [B, h, R]
    """Places ``[B, h, 1]`` of the lowest and the highest threshold among descending cosines."""
    for times in (_SPREAD, 1):
        rank = (times * wanted - 1).clamp(min=0, max=nearest.shape[-1] - 1)
        yield rank[..., None].expand(*nearest.shape[:2], 1)


def _taken(near: Tensor) -> Tensor:  # bool [B, h, R, W] -> bool [B, h, R]
    """Rows that a seed takes, if it takes all that are near.

    A row is a seed unless an earlier seed is near; so it is known once the earlier ones are. What
    is near is packed into bits, so that a round costs little.
    """
    near = _packed(near)
    words = near.shape[-1]
    seed = (near == 0).all(-1)
    taken = torch.zeros_like(seed)
    while not bool((known := seed | taken).all()):
        taken = taken | ~known & (near & _window(seed, words)).any(-1)
        waits = (near & _window(~(seed | taken), words)).any(-1)
        seed = seed | ~(taken | waits)
    return taken


def _packed(x: Tensor) -> Tensor:  # bool [..., W] -> int64 [..., words]
    """Bits of the last dimension, the last one highest; zeros in front fill the first word."""
    x = F.pad(x, (-x.shape[-1] % _WORD, 0)) if x.shape[-1] % _WORD else x.contiguous()
    # The product brings the lowest bits of eight bytes together in the highest byte.
    eights = (x.view(torch.int64) * 0x0102040810204080) >> 56
    return eights.to(torch.uint8).view(torch.int64)


def _window(x: Tensor, words: int) -> Tensor:  # bool [B, h, R] -> int64 [B, h, R, words]
    """The rows before each, packed as by ``_packed``: the one just before it is the highest bit."""
    rows, (right, left, kept) = x.shape[-1], _shifts(x.device)
    whole = F.pad(x, (words * _WORD, -rows % _WORD)).unflatten(-1, (-1, _WORD))
    block = _packed(whole)  # the last bit of a word is its last row: [B, h, blocks, 1]
    # A row has some rows of its own block before it, and the others of the block before that.
    own, before = (block << left) & ~kept, (block >> right) & kept
    count = -(-rows // _WORD)
    windows = [
        own[:, :, words - n : words - n + count] | before[:, :, words - n - 1 :][:, :, :count]
        for n in reversed(range(words))
    ]
    return torch.stack([window.flatten(2)[..., :rows] for window in windows], -1)


@cache
def _shifts(device: torch.device) -> tuple[Tensor, Tensor, Tensor]:  # 3 x int64 [64]
    """How far words go to the right and to the left for each row of a block, and which bits a word
    that has gone to the right keeps."""
    right = torch.arange(_WORD, device=device)
    kept = ((1 << (_WORD - right.clamp(min=1))) - 1).where(right > 0, -1)
    return right, -right % _WORD, kept


def _behind(x: Tensor, reach: int) -> Tensor:  # [B, h, R] -> view [B, h, R, W]
    """What stands ``W`` to 1 rows before each row, zeros before the first."""
    return F.pad(x, (reach, -1)).unfold(-1, reach, 1)


def _banded(unit: Tensor, reach: int) -> Tensor:  # [B, h, R, D] -> [B, h, R, W]
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
    return band.reshape(batch, heads, blocks * reach, reach)[:, :, :rows].contiguous()
