"""How the queries of a head lie to each other before RoPE turns them by position.

Section 2.2 of BeaconKV (arXiv 2609.04971), and the sets of observation queries of its figure 6a.
"""

from __future__ import annotations

import torch
from torch import Tensor

from zoomkv.ops.farthest_point import farthest_points

OBSERVED = 32
"""Queries of an observation set."""
_HALF = OBSERVED // 2


def cosine_similarity(x: Tensor, y: Tensor) -> Tensor:  # [..., N, D], [..., M, D] -> [..., N, M]
    """Of every pair, in fp32."""
    x = torch.nn.functional.normalize(x.float(), dim=-1)
    y = torch.nn.functional.normalize(y.float(), dim=-1)
    return x @ y.transpose(-1, -2)


def principal_plane(x: Tensor) -> tuple[Tensor, Tensor]:  # [N, D] -> [N, 2], [2]
    """Coordinates along the two principal components, and their shares of the variance.

    Of the two signs that a component can have, it gets the one that makes its largest entry
    positive.
    """
    centred = x.double() - x.double().mean(0)
    variance, axes = torch.linalg.eigh(centred.T @ centred)  # ascending
    axes = axes[:, [-1, -2]]
    axes = axes * axes.gather(0, axes.abs().argmax(0, keepdim=True)).sign()
    share = variance[[-1, -2]].clamp_min(0) / variance.sum().clamp_min(torch.finfo(x.dtype).tiny)
    return (centred @ axes).float(), share.float()


def observation_sets(history: Tensor, generator: torch.Generator) -> dict[str, Tensor]:
    """Four ways to choose 32 of the queries so far that stand for later ones (figure 6a).

    In three of them 16 are the most recent ones; the others come from those before.

    Args:
        history: Queries before RoPE in the order of time, ``[H, N, D]``, more than 32.
        generator: Of the random set, which each head draws for itself; on the CPU.

    Returns:
        Indices into the history, ``[H, 32]``, by the set's name.
    """
    heads, length, _ = history.shape
    assert length > OBSERVED
    time = torch.arange(length, device=history.device).expand(heads, -1)
    recent, older = time[:, -_HALF:], length - _HALF
    drawn = torch.rand(heads, older, generator=generator).topk(_HALF).indices.to(history.device)
    far = farthest_points(history[None, :, :older], _HALF)[0]
    return {
        "32 recent": time[:, -OBSERVED:],
        "16 recent + 16 FPS": torch.cat([far, recent], 1),
        "16 initial + 16 recent": torch.cat([time[:, :_HALF], recent], 1),
        "16 recent + 16 random": torch.cat([drawn, recent], 1),
    }


def coverage(observed: Tensor, later: Tensor) -> Tensor:  # [H, N, D], [H, Q, D] -> [H, Q]
    """How near each later query is to the set: its largest cosine similarity to one of it."""
    return cosine_similarity(later, observed).amax(-1)
