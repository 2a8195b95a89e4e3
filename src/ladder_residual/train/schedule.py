"""The learning rate of each step, as a share of the recipe's. No torch, nothing to save: the step alone decides."""

from __future__ import annotations

import math

from .recipe import Optimizer


def lr_share(step: int, steps: int, optimizer: Optimizer) -> float:
    """Of step ``step`` (0 is the first) of ``steps``: linear warm-up, then what the schedule says, ``final_lr`` at the last step."""
    if step < optimizer.warmup:
        return (step + 1) / optimizer.warmup
    last = max(steps - 1, 1)
    if optimizer.schedule == "constant":
        return 1.0
    if optimizer.schedule == "wsd":
        start = max(optimizer.warmup, last - round(optimizer.decay * steps))
        progress = (step - start) / max(last - start, 1)
        return 1.0 - (1.0 - optimizer.final_lr) * min(max(progress, 0.0), 1.0)
    progress = min((step - optimizer.warmup) / max(last - optimizer.warmup, 1), 1.0)
    return optimizer.final_lr + (1.0 - optimizer.final_lr) * 0.5 * (1.0 + math.cos(math.pi * progress))
