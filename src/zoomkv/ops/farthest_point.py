"""A few vectors that stand for many: farthest point sampling (BeaconKV, arXiv 2609.04971).

The vectors are queries before RoPE; near means a high cosine similarity. Nothing here builds an
N x N matrix, so a whole prompt is no harder than a buffer of 32.
"""

import torch
from torch import Tensor

# Similarities are compared in steps of 2**-16, far above fp32's rounding, which depends on the
# shape of the batch and would else break the ties between repeated vectors.
_STEPS = 2.0**16
_EPS = 1e-6


@torch.no_grad()
def farthest_points(
    x: Tensor,  # [..., N, D]
    count: int,
    valid: Tensor | None = None,  # bool, broadcasts to [..., N]
) -> Tensor:  # int64 [..., min(count, N)]
    """Chooses distinct vectors that cover all directions (BeaconKV's appendix on FPS).

    The first is the one least similar to the mean of all, each further one the least similar to
    its nearest among those chosen. Equal similarities prefer the smaller index, and a vector may
    be repeated in ``x``: its copies are chosen last.

    Args:
        x: Vectors of any float dtype and any leading dims; scores are cosines in fp32, whatever
            autocast says. A zero vector is at similarity 0 to everything.
        count: Vectors to choose.
        valid: The vectors that may be chosen and that the mean counts; all by default. The
            others may hold anything, NaN too.

    Returns:
        Indices in ascending order, which is time order for queries. Where fewer than ``count``
        are valid, -1 comes first for each that is missing. With N <= count, all that are valid.

    Raises:
        ValueError: ``count`` below 1, or ``valid`` that isn't bool.
    """
    valid, count = _checked(x, count, valid)
    if count == x.shape[-2]:
        every = torch.arange(count, device=x.device)
        return torch.where(valid, every, -1).sort(dim=-1).values
    with torch.autocast(x.device.type, enabled=False):
        unit = _normalised(x, valid)
        return _farthest(unit, count, valid)


@torch.no_grad()
def nearest_to_centroids(
    x: Tensor,  # [..., N, D]
    count: int,
    valid: Tensor | None = None,  # bool, broadcasts to [..., N]
    iterations: int = 10,
) -> Tensor:  # int64 [..., min(count, N)]
    """Chooses the vectors nearest to the centroids of spherical k-means, an ablation of FPS.

    The centroids start at ``farthest_points``, so nothing is random; a centroid that loses all
    its vectors stays where it was. One after the other takes the vector nearest to it that none
    before it took.

    Args:
        x: As for ``farthest_points``.
        count: Clusters, and vectors to choose.
        valid: As for ``farthest_points``.
        iterations: Rounds of k-means, at least 0.

    Returns:
        Indices laid out as ``farthest_points`` does.

    Raises:
        ValueError: As for ``farthest_points``, or ``iterations`` below 0.
    """
    if iterations < 0:
        raise ValueError(f"iterations is {iterations}; give 0 or more rounds of k-means")
    if count >= x.shape[-2]:
        return farthest_points(x, count, valid)
    valid, count = _checked(x, count, valid)
    with torch.autocast(x.device.type, enabled=False):
        unit = _normalised(x, valid)
        start = _farthest(unit, count, valid).clamp(min=0)
        centroids = unit.take_along_dim(start[..., None], dim=-2)  # [..., count, D]
        clusters = torch.arange(count, device=x.device)
        for _ in range(iterations):
            nearest = _snapped(unit @ centroids.mT).argmax(dim=-1, keepdim=True)  # [..., N, 1]
            member = (nearest == clusters).float().mT  # [..., count, N]; invalid ones add zeros
            total = member @ unit
            length = torch.linalg.vector_norm(total, dim=-1, keepdim=True)
            centroids = torch.where(length > _EPS, total / length.clamp(min=_EPS), centroids)
        distance = -_snapped(centroids @ unit.mT)  # [..., count, N]
        taken, picks = ~valid, []
        for own in distance.unbind(dim=-2):
            index = own.masked_fill(taken, torch.inf).argmin(dim=-1, keepdim=True)
            taken = taken.scatter(-1, index, True)
            picks.append(index)
        return _in_order(picks, valid)


def _checked(x: Tensor, count: int, valid: Tensor | None) -> tuple[Tensor, int]:
    if count < 1:
        raise ValueError(f"count is {count}; at least one vector must be chosen")
    shape = x.shape[:-1]
    if valid is None:
        valid = torch.ones(shape, dtype=torch.bool, device=x.device)
    if valid.dtype != torch.bool:
        raise ValueError(f"valid is {valid.dtype}; give a bool mask, True for vectors that exist")
    return valid.expand(shape), min(count, shape[-1])


def _normalised(x: Tensor, valid: Tensor) -> Tensor:
    """One fp32 copy, unit length, zeros where invalid."""
    unit = x.to(torch.float32, copy=True, memory_format=torch.contiguous_format)
    unit /= torch.linalg.vector_norm(unit, dim=-1, keepdim=True).clamp(min=_EPS)
    return unit.masked_fill_(~valid[..., None], 0)


def _farthest(unit: Tensor, count: int, valid: Tensor) -> Tensor:
    # The mean similarity to all vectors is the similarity to their mean.
    mean = unit.sum(dim=-2, keepdim=True) / valid.sum(-1).clamp(min=1)[..., None, None]
    score = _snapped(mean @ unit.mT).squeeze(-2).masked_fill_(~valid, torch.inf)
    index = score.argmin(dim=-1, keepdim=True)
    picks = [index]
    nearest = score.masked_fill(valid, -torch.inf)
    for _ in range(count - 1):
        chosen = unit.take_along_dim(index[..., None], dim=-2)
        similarity = _snapped(chosen @ unit.mT).squeeze(-2)
        # What is at infinity, invalid or chosen, stays there.
        nearest = torch.maximum(nearest, similarity).scatter_(-1, index, torch.inf)
        index = nearest.argmin(dim=-1, keepdim=True)
        picks.append(index)
    return _in_order(picks, valid)


def _snapped(similarity: Tensor) -> Tensor:
    return similarity.mul_(_STEPS).round_()


def _in_order(picks: list[Tensor], valid: Tensor) -> Tensor:
    """Sorts what was picked; a row that ran out of valid vectors picked nothing from there on."""
    picked = torch.cat(picks, dim=-1)
    turn = torch.arange(len(picks), device=picked.device)
    return picked.masked_fill(turn >= valid.sum(-1, keepdim=True), -1).sort(dim=-1).values
