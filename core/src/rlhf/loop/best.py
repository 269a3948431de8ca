"""The best evaluation so far: which checkpoint is kept for it, and when patience is at an end."""

import math
from collections.abc import Mapping
from typing import Any

from attrs import define

from rlhf.config.objective import objective
from rlhf.errors import SameOnAllRanks

REMEMBERED = ("step", "value", "waited", "seen")


@define
class Best:
    """Fed with every evaluation that counts; the same on every rank, since metrics are."""

    metric: str | None = None
    """What `checkpoint.best` says; None asks for nothing."""
    patience: int | None = None
    step: int | None = None
    """The step of the best evaluation, None before the first."""
    value: float = math.nan
    waited: int = 0
    """Evaluations since then."""
    seen: int | None = None
    """The step of the newest evaluation."""

    def take(self, step: int, metrics: Mapping[str, float]) -> bool:
        """Whether this evaluation is better than all before; a number that is not finite never is.
        Raises RLHFError when there is no such metric."""
        if self.metric is None:
            return False
        name, sign = objective(self.metric)
        if name not in metrics:
            known = ", ".join(sorted(name for name in metrics if name.startswith("eval/")))
            raise SameOnAllRanks(
                f"checkpoint.best is {self.metric} but an evaluation of this run has {known}"
            )
        self.seen = step
        value = metrics[name]
        better = self.step is None or sign * value > sign * self.value
        if math.isfinite(value) and better:
            self.step, self.value, self.waited = step, value, 0
            return True
        self.waited += 1
        return False

    @property
    def exhausted(self) -> bool:
        """Whether patience is at an end."""
        return self.patience is not None and self.waited >= self.patience

    def forget(self) -> None:
        """The next evaluation counts as the first."""
        self.step, self.value, self.waited = None, math.nan, 0

    def state(self) -> dict[str, Any]:
        """What a checkpoint must remember (plain data)."""
        return {name: getattr(self, name) for name in ("metric", *REMEMBERED)}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Take back what `state` gave; of another metric it means nothing."""
        if state.get("metric") == self.metric:
            for name in REMEMBERED:
                setattr(self, name, state[name])

    def __str__(self) -> str:
        """What was best, for the run's last lines."""
        return f"{self.metric} {self.value:.4g} at step {self.step}"
