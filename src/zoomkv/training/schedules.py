"""Learning-rate schedules."""

from __future__ import annotations

import math

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR


def cosine_with_warmup(optimizer: Optimizer, steps: int, warmup: float, floor: float) -> LambdaLR:
    """A schedule for each optimizer step: linear warm-up, then half a cosine.

    Args:
        optimizer: Its learning rates are the peak.
        steps: Optimizer steps of the whole training.
        warmup: Share of the steps that warm up.
        floor: Share of the peak that is left at the end.
    """
    rising = max(1, round(warmup * steps))

    def share(step: int) -> float:
        if step < rising:
            return (step + 1) / rising
        done = min(1.0, (step - rising) / max(1, steps - rising))
        return floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * done))

    return LambdaLR(optimizer, share)
