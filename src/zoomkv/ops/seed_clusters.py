"""Clusters of like keys around seeds, as many as a budget allows (SemantiCache, arXiv 2603.14303).

Within a chunk the first key that is in no cluster yet is a seed; it takes all later ones whose
cosine with it exceeds a threshold and that are in no cluster either; and so on.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

_WORD = 64  # bits
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
    same = _behind(chunk, reach) == chunk[..., None]
    same &= _behind(free, reach) & free[..., None]
    cosine = cosine.masked_fill_(~same, -torch.inf)
    nothing = cosine.new_full(keys.shape[:2], -1.01)
    over = (count - target).clamp(min=0)
    over = over.minimum(_taken(cosine > nothing[..., None, None]).sum(-1).amin(1))[:, None]

    low, high = nothing, torch.ones_like(nothing)
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        enough = _taken(cosine > middle[..., None, None]).sum(-1) >= over
        low, high = low.where(~enough, middle), high.where(enough, middle)
    near = cosine > low[..., None, None]
    taken = _taken(near)

    by = near & _behind(~taken, reach)
    first = by.view(torch.uint8).argmax(-1, keepdim=True)  # seeds take in order
    fit = cosine.gather(-1, first)[..., 0].masked_fill(~taken, torch.inf)
    spare = (taken.sum(-1) - over)[..., None]
    worst = torch.zeros_like(taken).scatter_(
        -1, fit.argsort(dim=-1, stable=True), (rows < spare).expand_as(taken)
    )
    seed = rows - (reach - first[..., 0])
    return torch.where(taken & ~worst, seed, rows), count - over[:, 0]


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
    bits, width = _shifted(x.long(), 1), 1
    while width < _WORD:
        bits = _shifted(bits, width) | bits << width
        width *= 2
    return torch.stack([_shifted(bits, n * _WORD) for n in reversed(range(words))], -1)


def _shifted(x: Tensor, by: int) -> Tensor:  # [B, h, R]
    """What stands so many rows before each, zeros before the first."""
    return F.pad(x, (by, 0))[..., : x.shape[-1]] if by else x


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
