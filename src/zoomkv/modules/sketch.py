"""Keys as a few 4-bit numbers: enough to tell which of them a query would look at.

SeKV (arXiv 2606.31145, section 3.3) routes by one projected mean key a span. A mean has forgotten
the one token that matters; here every token keeps its own projection, so narrow and so coarse that
it takes a thirtieth of its key and value.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn

LEVELS = 16
_REACH = 5.0  # standard deviations that the levels cover: keys have heavy tails
_SHRINKAGE = 0.01  # towards equal moments in all directions: a short prompt leaves many unseen


class Projections(NamedTuple):
    """Two linear maps whose images have about the dot product that queries and keys have."""

    query: Tensor
    """``[..., D, W]``"""
    key: Tensor
    """``[..., D, W]``"""


@dataclass(slots=True)
class Codes:
    """Sketches of some keys, and what it takes to read them.

    Two numbers share a byte; tokens come last, so that a product with all of them reads memory in
    order. Later keys join with the levels of the first ones.
    """

    packed: Tensor
    """uint8 ``[B, Hkv, W / 2, T]``: number i in the low half, i + W / 2 in the high one."""
    step: Tensor
    """Distance of two levels, fp32 ``[B, Hkv, W]``."""
    mean: Tensor
    """What was taken off the keys, fp32 ``[B, Hkv, D]``."""

    def tensors(self) -> tuple[Tensor, ...]:
        """All that is stored."""
        return self.packed, self.step, self.mean

    def select(self, rows: Tensor) -> Codes:
        """The given batch rows."""
        rows = rows.to(self.packed.device)
        return Codes(self.packed[rows], self.step[rows], self.mean[rows])


@dataclass(frozen=True)
class SketchShape:
    """What a sketch was made for."""

    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    width: int


class Sketch(nn.Module):
    """Trained projections of every layer: for each query head one, for each KV head one.

    Args:
        layers: Of the model.
        heads: Query heads.
        kv_heads: KV heads.
        head_dim: Width of a key.
        width: Numbers that are kept of a key; even.

    Raises:
        ValueError: An odd width, one above ``head_dim``, or heads that don't form groups.
    """

    def __init__(self, layers: int, heads: int, kv_heads: int, head_dim: int, width: int) -> None:
        super().__init__()
        check_width(width, head_dim)
        if heads % kv_heads:
            raise ValueError(f"{heads} query heads don't share {kv_heads} KV heads evenly")
        self.shape = SketchShape(layers, heads, kv_heads, head_dim, width)
        self.query = nn.Parameter(torch.zeros(layers, heads, head_dim, width))
        self.key = nn.Parameter(torch.zeros(layers, kv_heads, head_dim, width))

    @property
    def width(self) -> int:
        """Numbers that are kept of a key."""
        return self.key.shape[-1]

    def of(self, layer: int) -> Projections:
        """A layer's maps: query ``[Hkv, G, D, W]`` and key ``[Hkv, D, W]``."""
        key = self.key[layer]
        return Projections(self.query[layer].unflatten(0, (key.shape[0], -1)), key)


def check_width(width: int, head_dim: int) -> int:
    """Returns the width of a sketch.

    Raises:
        ValueError: It is odd, below 2 or above ``head_dim``.
    """
    if isinstance(width, bool) or not isinstance(width, int) or width % 2 or width < 2:
        raise ValueError(f"width={width!r}: give an even number of at least 2, two share a byte")
    if width > head_dim:
        raise ValueError(f"width={width}: the model's keys have only {head_dim} numbers")
    return width


@torch.no_grad()
def fit(key_moments: Tensor, query_moments: Tensor, width: int) -> Projections:
    """The maps of least expected squared error of q.k, for given second moments of q and k.

    Args:
        key_moments: Of the keys about their mean, fp32 ``[..., D, D]``; any scale.
        query_moments: Of the queries that will ask, ``[..., D, D]``; any scale.
        width: Numbers to keep, W.

    Returns:
        ``query`` and ``key``, ``[..., D, W]``. The images of the keys have about equal variance.
    """
    whitening, turn = fit_whitened(key_moments, query_moments, width)
    with torch.autocast(key_moments.device.type, enabled=False):
        return Projections(whitening.query @ turn.query, whitening.key @ turn.key)


@torch.no_grad()
def fit_whitened(
    key_moments: Tensor, query_moments: Tensor, width: int
) -> tuple[Projections, Projections]:
    """The two factors of ``fit``'s maps: ``[..., D, D]`` and ``[..., D, W]``.

    The first make all directions of queries and of keys alike, so that steps of a training change
    the second ones evenly: some channels of keys are a hundred times as large as others.
    """
    with torch.autocast(key_moments.device.type, enabled=False):
        k, k_inverse = _roots(key_moments.float())
        q, q_inverse = _roots(query_moments.float())
        u, sigma, vh = torch.linalg.svd(q @ k)
        scale = sigma[..., :1]
        turn = Projections(u[..., :width] * (sigma / scale)[..., None, :width], vh.mT[..., :width])
        return Projections(q_inverse * scale[..., None], k_inverse), turn


def estimate(
    maps: Projections,
    query: Tensor,  # [B, Hkv, G, Q, D]
    keys: Tensor,  # [B, Hkv, T, D]
    present: Tensor,  # bool [B, T]
) -> Tensor:  # fp32 [B, Hkv, G, Q, T]
    """What ``logits`` gives for codes of these keys, up to one number for each query.

    Rounding to levels passes gradients on as if it were not there.

    Args:
        maps: Query ``[Hkv, G, D, W]`` and key ``[Hkv, D, W]``.
        query: Scaled queries.
        keys: After RoPE.
        present: Which there are.
    """
    with torch.autocast(keys.device.type, enabled=False):
        image, step, _ = _image(keys.float(), maps.key.float(), present)
        level = _level(image.detach(), step) - (LEVELS - 1) / 2
        rounded = image + (level * step[:, :, None] - image.detach())
        return image_of(query, maps.query[None]) @ rounded[:, :, None].mT


@torch.no_grad()
def encode(
    keys: Tensor,  # [B, Hkv, T, D]
    projection: Tensor,  # [Hkv, D, W] or [B, Hkv, D, W]
    present: Tensor,  # bool [B, T]
    like: Codes | None = None,
) -> Codes:
    """Sketches of keys.

    Args:
        keys: After RoPE.
        projection: Of the keys.
        present: Which tokens there are; the others' codes mean nothing.
        like: Earlier codes whose mean and levels to use; by default those of these keys.

    Returns:
        The codes of these keys alone.
    """
    with torch.autocast(keys.device.type, enabled=False):
        image, step, mean = _image(keys.float(), projection.float(), present, like)
        low, high = _level(image, step).to(torch.uint8).mT.chunk(2, dim=2)
        return Codes(low | (high << 4), step, mean)


def image_of(query: Tensor, projection: Tensor) -> Tensor:
    """Queries ``[B, Hkv, G, Q, D]`` as the codes see them, fp32 ``[B, Hkv, G, Q, W]``.

    Args:
        query: Scaled.
        projection: Of the queries, ``[B or 1, Hkv, G or 1, D, W]``.
    """
    with torch.autocast(query.device.type, enabled=False):
        return query.float() @ projection.float()


def logits(query: Tensor, image: Tensor, codes: Codes, bias: Tensor) -> Tensor:
    """About what the products of queries with the first keys are.

    Args:
        query: Scaled queries ``[B, Hkv, G, Q, D]``.
        image: The same as the codes see them ``[B, Hkv, G, Q, W]``.
        codes: Of the keys.
        bias: Added for each of the keys that are looked at, fp32 ``[B, T]``.

    Returns:
        fp32 ``[B, Hkv, G, Q, T]``.
    """
    with torch.autocast(image.device.type, enabled=False):
        batch, heads, group, rows, width = image.shape
        image = image.reshape(batch, heads, group * rows, width) * codes.step[:, :, None]
        constant = query.float().reshape(batch, heads, group * rows, -1) @ codes.mean[..., None]
        constant = constant - image.sum(-1, keepdim=True) * ((LEVELS - 1) / 2)
        length = bias.shape[1]
        level = image.new_empty(batch, heads, width, length)
        packed = codes.packed[..., :length]
        level[:, :, : width // 2] = packed & (LEVELS - 1)
        level[:, :, width // 2 :] = packed >> 4
        every = bias[:, None, None].expand(-1, heads, -1, -1).reshape(batch * heads, 1, length)
        out = torch.baddbmm(every, image.flatten(0, 1), level.flatten(0, 1))
        out += constant.flatten(0, 1)
        return out.view(batch, heads, group, rows, length)


def _image(
    keys: Tensor, projection: Tensor, present: Tensor, like: Codes | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Images of keys about their mean, the distance of their levels, the mean."""
    weight = present.float()[:, None, :, None]  # [B, 1, T, 1]
    count = weight.sum(2).clamp(min=1)
    mean = (keys * weight).sum(2) / count if like is None else like.mean
    image = (keys - mean[:, :, None]) @ projection  # [B, Hkv, T, W]
    if like is not None:
        return image, like.step, mean
    deviation = ((image.detach().square() * weight).sum(2) / count).sqrt()
    return image, deviation.clamp(min=1e-12) * (2 * _REACH / LEVELS), mean


def _level(image: Tensor, step: Tensor) -> Tensor:
    return ((image / step[:, :, None]).floor() + LEVELS // 2).clamp(0, LEVELS - 1)


def _roots(moments: Tensor) -> tuple[Tensor, Tensor]:  # 2 x [..., D, D]
    """Symmetric root and its inverse."""
    values, vectors = torch.linalg.eigh(moments)
    mean = values.mean(-1, keepdim=True).clamp(min=1e-30)
    root = (values.clamp(min=0) + _SHRINKAGE * mean).sqrt()[..., None, :]
    return (vectors * root) @ vectors.mT, (vectors / root) @ vectors.mT
