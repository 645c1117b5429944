"""Which spans a query needs, and how far the gates are from saying so (SeKV, L_zoom)."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def coverage_target(
    mass: Tensor,  # [..., S]
    rho: float = 0.9,
    floor: float = 0.0,
    outside: Tensor | float | None = None,  # [...]
) -> Tensor:  # bool [..., S]
    """The smallest set of spans with which a query sees ``rho`` of what it attends to.

    Spans are taken by falling mass, equal ones in order, until they and what is seen anyway (exact
    tokens: anchors, short runs, the recent window) reach ``rho`` of the total. So a query that
    looks at exact tokens alone needs no span. The paper takes the share of the mass on spans only,
    and then even such a query needs one: that is ``outside`` = 0.

    Args:
        mass: The teacher's attention on each span (arXiv 2606.31145, section 3.3), 0 for entries
            that are no span.
        rho: Share to reach.
        floor: A span with this mass or less is never needed, even if ``rho`` is missed for it.
        outside: Attention on exact tokens. By default what ``mass`` lacks of 1, which is right for
            attention weights of one query over everything it can see.

    Returns:
        True for needed spans.

    Raises:
        ValueError: ``rho`` outside of (0, 1], or ``floor`` below 0.
    """
    if not 0 < rho <= 1:
        raise ValueError(f"rho={rho}: give a share of the attention in (0, 1]")
    if floor < 0:
        raise ValueError(f"floor={floor}: give an attention mass, 0 or more")
    # In fp64 the sum hardly depends on the order of the spans.
    mass, order = mass.detach().double().sort(dim=-1, descending=True, stable=True)
    reached = mass.cumsum(-1)
    before, within = F.pad(reached, (1, 0))[..., :-1], reached[..., -1:]
    if outside is None:
        outside = (1 - within.sum(-1)).clamp(min=0)
    seen = torch.as_tensor(outside, dtype=torch.float64, device=mass.device)[..., None]
    needed = (seen + before < rho * (seen + within)) & (mass > floor)
    return torch.zeros_like(needed).scatter(-1, order, needed)


def zoom_bce(
    logits: Tensor,  # [..., S]
    target: Tensor,  # bool [..., S]
    valid: Tensor,  # bool, broadcasts to [..., S]
    positive_weight: float = 10.0,
) -> Tensor:  # scalar
    """Binary cross-entropy of the gates, a needed span counting ``positive_weight`` times.

    It looks at gates, not at decisions, so thresholds have no part in it.

    Args:
        logits: Before the sigmoid, finite where ``valid``; anything (-inf too) elsewhere.
        target: The spans that are needed.
        valid: The spans that a query can open: not padding, not what comes after it, not what is
            exact already.
        positive_weight: Above 1, as needed spans are rare.

    Returns:
        Nats, the mean over all valid entries, in fp32 (fp64 for fp64 logits); 0 if there are none.

    Raises:
        ValueError: ``positive_weight`` not above 0.
    """
    if not positive_weight > 0:
        raise ValueError(f"positive_weight={positive_weight}: give a number above 0")
    valid = valid.expand_as(logits)
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32)).masked_fill(~valid, 0)
    wanted = target.to(logits.dtype)
    weight = valid * (1 + (positive_weight - 1) * wanted)
    loss = F.binary_cross_entropy_with_logits(logits, wanted, weight, reduction="sum")
    return loss / valid.sum().clamp(min=1)
