"""Learning-rate schedules: the rate of step k of N is lr * f(k / N), also in a run that stops
early."""

import math

from rlhf.config.sections import OptimConfig


def rate(step: int, *, steps: int, optim: OptimConfig) -> float:
    """Return the factor on `optim.lr` at `step` (0-based) of `steps`.

    Warm-up is linear and above zero from step 0; after the last step the factor stays at the floor.
    """
    warmup = round(optim.warmup * steps) if optim.warmup < 1 else int(optim.warmup)
    if step < warmup:
        return (step + 1) / (warmup + 1)
    if optim.schedule == "constant":
        return 1.0
    progress = min(1.0, (step - warmup) / max(1, steps - warmup))
    decay = 1 - progress if optim.schedule == "linear" else (1 + math.cos(math.pi * progress)) / 2
    return optim.min_lr + (1 - optim.min_lr) * decay
