"""The extension `new_name`: the learning rate stays at its peak and falls in the last fifth of the
run (warm-up, stable, decay)."""

from collections.abc import Generator

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler

from rlhf.hookspecs import hookimpl
from rlhf.plugin import Config

DECAY = 0.2
"""Share of the steps in which the rate falls."""


class NewName:
    """Replaces the schedule of the configuration, whose warm-up it keeps."""

    @hookimpl(wrapper=True)
    def build_schedule(
        self, optimizer: Optimizer, config: Config, steps: int
    ) -> Generator[None, LRScheduler, LRScheduler]:
        yield
        warmup = config.optim.warmup
        warmup = warmup * steps if warmup < 1 else warmup
        return LambdaLR(optimizer, lambda step: rate(step, steps=steps, warmup=warmup))


def rate(step: int, *, steps: int, warmup: float) -> float:
    """Return the share of the peak rate at a step, with the decay `1 - sqrt` (arXiv 2405.18392)."""
    rising = min(1.0, (step + 1) / (warmup + 1))
    decayed = max(0.0, (step + 1 - (1 - DECAY) * steps) / (DECAY * steps))
    return min(rising, 1 - min(1.0, decayed) ** 0.5)
