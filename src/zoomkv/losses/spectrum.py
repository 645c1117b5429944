"""What gates take from low-rank spans (SeKV, arXiv 2606.31145, L_recon)."""

from __future__ import annotations

import torch
from torch import Tensor


def spectral_loss(gates: Tensor, sigma: Tensor) -> Tensor:  # [..., R], [..., R] -> scalar
    """The share of a span's energy that its gates lose, mean over spans.

    The components are orthogonal, so a gate m loses (1 - m)^2 sigma^2 of the factors' energy. The
    paper adds these losses up; as shares, strong layers and long spans count like others, and the
    number of spans does not change the scale.

    Args:
        gates: Of each component, of keys and values alike.
        sigma: Singular values; constants, no gradient reaches them.

    Returns:
        Between 0 (all gates 1) and 1 (all 0), in fp32 (fp64 for fp64 gates). Spans without energy
        don't count; 0 if there are no others.
    """
    wide = torch.promote_types(gates.dtype, torch.float32)
    energy = sigma.detach().to(wide).square()
    total = energy.sum(-1)
    some = total > 0
    lost = ((1 - gates.to(wide)).square() * energy).sum(-1) / total.where(some, 1)
    return lost.sum() / some.sum().clamp(min=1)
