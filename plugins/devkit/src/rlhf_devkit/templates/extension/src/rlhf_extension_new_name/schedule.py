"""The schedule, which keeps the warm-up of the configuration."""

from collections.abc import Generator

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler

from rlhf.hookspecs import hookimpl
from rlhf.plugin import Config
from rlhf_extension_new_name import NewNameConfig


class NewName:
    """Replaces the schedule of the configuration."""

    def __init__(self, config: NewNameConfig) -> None:
        self.config = config

    @hookimpl(wrapper=True)
    def build_schedule(
        self, optimizer: Optimizer, config: Config, steps: int
    ) -> Generator[None, LRScheduler, LRScheduler]:
        yield
        warmup, decay = config.optim.warmup, self.config.decay
        warmup = warmup * steps if warmup < 1 else warmup
        return LambdaLR(optimizer, lambda step: rate(step, steps=steps, warmup=warmup, decay=decay))


def rate(step: int, *, steps: int, warmup: float, decay: float) -> float:
    """Return the share of the peak rate at a step, with the decay `1 - sqrt` (arXiv 2405.18392)."""
    rising = min(1.0, (step + 1) / (warmup + 1))
    decayed = max(0.0, (step + 1 - (1 - decay) * steps) / (decay * steps))
    return min(rising, 1 - min(1.0, decayed) ** 0.5)
