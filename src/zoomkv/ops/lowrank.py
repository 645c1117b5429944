"""Spans as products of two thin matrices (SeKV, arXiv 2606.31145, section 3.2).

The keys (or values) of a span, S rows of D, are kept as A [S, r] and V [D, r]: A V^T is the best
approximation of rank r, and each component can be weighed by a gate or dropped.
"""

from collections.abc import Callable, Iterator
from typing import Literal

import torch
from torch import Tensor

Method = Literal["gram", "svd", "randomised"]

# Matrices are padded to a multiple of so many rows and factorised together.
_BUCKET = 8
_OVERSAMPLING = 8
_POWER_ITERATIONS = 2

_Triple = tuple[Tensor, Tensor, Tensor]


@torch.no_grad()
def factorise(
    rows: Tensor,  # [N, S, D]
    length: Tensor,  # int64 [N]
    rank: int | Tensor,  # or int64 [N]
    method: Method = "gram",
) -> _Triple:  # fp32 [N, S, R], [N, D, R], [N, R]
    """Factors of the best approximation of low rank to each of many matrices.

    ``gram`` takes the eigenvectors of the smaller Gram matrix and projects on them. Components far
    below 3e-4 of the largest are mixed among each other, as fp32 can't tell their squares apart;
    still A V^T loses no more than the optimum and rounding, and nothing at full rank. ``svd`` keeps
    them apart. ``randomised`` samples the column space with two power iterations (from fixed random
    numbers: equal input gives equal factors); where the sample would hold it all, it is ``gram``.

    The vectors of the shorter side are orthonormal and the others of unit length, so a gate m on
    each component loses (1 - m)^2 sigma^2 of it.

    Args:
        rows: The matrices, finite; rows from ``length`` on are not looked at. Floats of any kind.
        length: Rows of each; 0 gives zeros.
        rank: Components to keep, one number for all or one for each. A matrix has no more than
            min(length, D); R is the largest rank asked for that S and D allow.
        method: How.

    Returns:
        ``A = U * sigma``, ``V`` and ``sigma``, largest first, zeros beyond a matrix's own rank or
        length. Signs are arbitrary, and so are the vectors where sigma is rounding.
    """
    count, longest, dim = rows.shape
    length, rank = length.to(rows.device), torch.as_tensor(rank, device=rows.device).expand(count)
    kept = min(int(rank.max()) if count else 0, longest, dim)
    a = torch.zeros(count, longest, kept, device=rows.device)
    v = torch.zeros(count, dim, kept, device=rows.device)
    sigma = torch.zeros(count, kept, device=rows.device)
    decompose = _METHODS[method]
    with torch.autocast(rows.device.type, enabled=False):
        for size, which in _buckets(length, longest):
            beyond = torch.arange(size, device=rows.device) >= length[which, None]
            part = rows[which, :size].float().masked_fill_(beyond[..., None], 0)
            width = min(kept, size, dim)
            a[which, :size, :width], v[which, :, :width], sigma[which, :width] = decompose(
                part, width
            )
    beyond = torch.arange(kept, device=rows.device) >= torch.minimum(rank, length)[:, None]
    sigma.masked_fill_(beyond, 0)
    a.masked_fill_(beyond[:, None], 0)
    v.masked_fill_(beyond[:, None], 0)
    return a, v, sigma


def rebuild(a: Tensor, v: Tensor) -> Tensor:  # [..., S, R], [..., D, R] -> [..., S, D]
    """The rows that the factors stand for, in their dtype, whatever autocast says."""
    with torch.autocast(a.device.type, enabled=False):
        return a @ v.mT


def break_even_rank(length: Tensor, dim: int, rho: float = 1.0) -> Tensor:  # int64, as length
    """The largest rank whose factors take no more than ``rho`` of what the rows take.

    Factors of rank r are r (S + D + 1) numbers, sigma included, rows are S D.

    Args:
        length: Rows of each span, S.
        dim: Width of a row, D.
        rho: Share of the rows' storage that factors may take.

    Returns:
        Ranks; 0 where not even one component is worth it, so that the rows had better be kept.

    Raises:
        ValueError: ``rho`` not above 0.
    """
    if not rho > 0:
        raise ValueError(f"rho is {rho}; give the share of the storage that factors may take")
    # One division, so that whole quotients stay whole.
    return (length.double() * (rho * dim) / (length + dim + 1)).floor().long()


def _buckets(length: Tensor, longest: int) -> Iterator[tuple[int, Tensor]]:
    """Padded sizes and the matrices that they suit."""
    padded = ((length + _BUCKET - 1) // _BUCKET * _BUCKET).clamp(max=longest)
    for size in padded.unique().tolist():
        if size:
            yield size, (padded == size).nonzero().squeeze(1)


def _gram(x: Tensor, rank: int) -> _Triple:
    if x.shape[-2] > x.shape[-1]:
        v = _leading(x.mT @ x, rank)
        a = x @ v
        return a, v, torch.linalg.vector_norm(a, dim=-2)
    u = _leading(x @ x.mT, rank)
    return _scaled(u, x.mT @ u)


def _svd(x: Tensor, rank: int) -> _Triple:
    u, sigma, vh = torch.linalg.svd(x, full_matrices=False)
    sigma = sigma[..., :rank]
    return u[..., :rank] * sigma[..., None, :], vh[..., :rank, :].mT, sigma


def _randomised(x: Tensor, rank: int) -> _Triple:
    sample = rank + _OVERSAMPLING
    if sample >= min(x.shape[-2:]):
        return _gram(x, rank)
    generator = torch.Generator(x.device).manual_seed(0)
    directions = torch.randn(x.shape[-1], sample, generator=generator, device=x.device)
    q = torch.linalg.qr(x @ directions).Q
    for _ in range(_POWER_ITERATIONS):
        q = torch.linalg.qr(x @ torch.linalg.qr(x.mT @ q).Q).Q
    inside = x.mT @ q  # [N, D, sample]
    u = _leading(inside.mT @ inside, rank)
    return _scaled(q @ u, inside @ u)


_METHODS: dict[str, Callable[[Tensor, int], _Triple]] = {
    "gram": _gram,
    "svd": _svd,
    "randomised": _randomised,
}


def _leading(gram: Tensor, rank: int) -> Tensor:
    return torch.linalg.eigh(gram).eigenvectors.flip(-1)[..., :rank]


def _scaled(u: Tensor, projected: Tensor) -> _Triple:
    """Factors from U and X^T U. Their product projects X on U, however rough sigma is."""
    sigma = torch.linalg.vector_norm(projected, dim=-2)
    v = projected / sigma.where(sigma > 0, 1)[..., None, :]
    return u * sigma[..., None, :], v, sigma
