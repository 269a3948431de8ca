"""Core's answers to the backend hooks that a backend may leave out."""

from collections.abc import Sequence

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler

from rlhf.config.sections import Config
from rlhf.engine import Layout
from rlhf.hookspecs import Finding, hookimpl
from rlhf.loop.learning_rate import rate


class DefaultHooks:
    """Called after the backend's own implementations."""

    @hookimpl(trylast=True)
    def build_schedule(self, optimizer: Optimizer, config: Config, steps: int) -> LRScheduler:
        return LambdaLR(optimizer, lambda step: rate(step, steps=steps, optim=config.optim))

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
