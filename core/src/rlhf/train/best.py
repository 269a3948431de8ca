"""The best evaluation so far: its checkpoint is kept, and patience counts from it."""

import math
from collections.abc import Mapping
from typing import Any

import attrs
from attrs import define

from rlhf.config.sections import objective
from rlhf.errors import SameOnAllRanks


@define
class Best:
    """The best of the evaluations that count; the same on every rank, since metrics are."""

    metric: str | None = None
    """`checkpoint.best`, or None to keep no best."""
    patience: int | None = None
    step: int | None = None
    """The step of the best evaluation, None before the first."""
    value: float = math.nan
    waited: int = 0
    """Evaluations since then."""
    seen: int | None = None
    """The step of the newest evaluation."""

    def update(self, step: int, metrics: Mapping[str, float]) -> bool:
        """Add an evaluation; return whether it is better than all before, which a number that is
        not finite never is. Raises RLHFError if it lacks the metric."""
        if self.metric is None:
            return False
        name, sign = objective(self.metric)
        if name not in metrics:
            available = ", ".join(sorted(name for name in metrics if name.startswith("eval/")))
            raise SameOnAllRanks(
                f"checkpoint.best: {name} is not a metric of this run's evaluations; available: "
                f"{available}"
            )
        self.seen = step
        value = metrics[name]
        better = math.isfinite(value) and (self.step is None or sign * value > sign * self.value)
        if better:
            self.step, self.value = step, value
        self.waited = 0 if better else self.waited + 1
        return better

    @property
    def exhausted(self) -> bool:
        """Whether `patience` evaluations in a row were not better."""
        return self.patience is not None and self.waited >= self.patience

    def forget(self) -> None:
        """Count the next evaluation as the first."""
        self.step, self.value, self.waited = None, math.nan, 0

    def state(self) -> dict[str, Any]:
        """Return what a checkpoint must hold (plain data)."""
        return attrs.asdict(self, filter=attrs.filters.exclude("patience"))

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Restore what `state` returned; ignored if it is of another metric."""
        if state.get("metric") == self.metric:
            for name, value in state.items():
                setattr(self, name, value)

    def __str__(self) -> str:
        """The metric, its best value and step."""
        return f"{self.metric} {self.value:.4g} at step {self.step}"
