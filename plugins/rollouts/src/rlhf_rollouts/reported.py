"""Metrics that the host knows when answers are written, for the steps that are trained on them."""

from collections.abc import Mapping, Sequence
from typing import Any

import attrs
import torch
from torch import Tensor

from rlhf.errors import RLHFError
from rlhf.hookspecs import CORE_METRICS
from rlhf.trainer import Example, PackedBatch

__all__ = ["Reported"]

VALUE = "rollout"
"""The value of examples that names their rollout, and the sum from which it follows."""
KEPT = 4
"""Rollouts of training that are kept, and of evaluations: a step is reported when the next one has
been taken."""
Sums = Mapping[str, tuple[float, float]]
"""Metrics by name, each as a sum and what it is divided by."""


class Reported:
    """The metrics of the newest rollouts, the same on every rank but for times. Evaluations may
    have several rollouts, which are added up."""

    def __init__(self) -> None:
        self._sums: dict[int, dict[str, tuple[float, float]]] = {}

    def add(
        self, examples: Sequence[Example], sums: Sums, *, step: int, training: bool
    ) -> list[Example]:
        """Return the examples of a rollout before (in training) or after `step` optimizer steps,
        marked as those to which `sums` belong. Raises RLHFError for a name that core uses."""
        for name in sorted(CORE_METRICS & sums.keys()):
            raise RLHFError(
                f"log_metric({name!r}): the run has a metric of this name; use another one"
            )
        number = step + 1 if training else -step - 1
        known = self._sums.pop(number, {})
        added = {
            name: (known.get(name, (0.0, 0.0))[0] + total, known.get(name, (0.0, 0.0))[1] + count)
            for name, (total, count) in sums.items()
        }
        self._sums[number] = known | added
        # Evaluations do not push out the rollout of the steps between them.
        alike = [other for other in self._sums if (other > 0) == training]
        for old in alike[:-KEPT]:
            del self._sums[old]
        return self.marked(examples, number)

    def marked(self, examples: Sequence[Example], number: int = 0) -> list[Example]:
        """Return the examples with the number of their rollout, per answer: core does not divide an
        example that has a value of its own."""
        return [
            attrs.evolve(
                example, values={**example.values, VALUE: [float(number)] * len(example.answers)}
            )
            for example in examples
        ]

    def metrics(self, batch: PackedBatch) -> dict[str, tuple[Tensor, str]]:
        """Return the metric of a loss by which `derived` knows the rollout."""
        numbers = batch.values[VALUE].double()
        return {VALUE: (torch.stack([numbers.sum(), torch.ones_like(numbers).sum()]), "")}

    def derived(self, sums: Mapping[str, Any]) -> dict[str, float]:
        """Return the metrics of the rollout of a step or an evaluation. Raises RLHFError for the
        name of another metric."""
        total, count = sums[VALUE]
        found = self._sums.get(round(total / count), {}) if count else {}
        for name in sorted(sums.keys() & found.keys()):
            raise RLHFError(
                f"log_metric({name!r}): the trainer has a metric of this name; use another one"
            )
        return {name: total / count for name, (total, count) in found.items() if count}

    def state(self) -> dict[str, Any]:
        """Return what a checkpoint must hold, as plain data."""
        return {str(number): dict(sums) for number, sums in self._sums.items()}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Restore what `state` returned."""
        self._sums = {
            int(number): {name: (total, count) for name, (total, count) in sums.items()}
            for number, sums in state.items()
        }
