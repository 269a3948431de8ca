"""Core's answers to the backend hooks that a backend may leave out."""

import math
from collections.abc import Mapping, Sequence

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler

from rlhf.config.sections import Config, OptimConfig
from rlhf.engine import Layout
from rlhf.hookspecs import Finding, hookimpl


class DefaultHooks:
    """Called after the backend's own implementations."""

    @hookimpl(trylast=True)
    def build_schedule(self, optimizer: Optimizer, config: Config, steps: int) -> LRScheduler:
        return LambdaLR(optimizer, lambda step: rate(step, steps=steps, optim=config.optim))

    @hookimpl(trylast=True)
    def axis_sizes(self, ranks: int) -> Mapping[str, int]:
        return {"data": ranks}

    @hookimpl(trylast=True)
    def shard(self) -> bool:
        return True

    @hookimpl(trylast=True)
    def layouts(self) -> Sequence[Layout]:
        return ()

    @hookimpl(trylast=True)
    def offload_states(self) -> int:
        return 0

    @hookimpl(trylast=True)
    def reload_states(self) -> bool:
        return True

    @hookimpl(trylast=True)
    def diagnose(self) -> Sequence[Finding]:
        return ()


def rate(step: int, *, steps: int, optim: OptimConfig) -> float:
    """Return the factor f(step / steps) on `optim.lr` at `step` (0-based), also in a run that
    stops early.

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
