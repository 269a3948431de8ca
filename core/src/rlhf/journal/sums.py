"""Sums and what they are per: the only way in which a mean is formed in this system."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from rlhf.engine import Deferred, Mesh
from rlhf.errors import RLHFError
from rlhf.trainer import Loss

Totals = Mapping[str, float]
Derive = Callable[[Mapping[str, Any]], Mapping[str, float]]

LEAST, MOST = "min", "max"
"""What a metric is per that is the least or the greatest value of the whole step or evaluation."""

TERM = "term "
"""Prefix of the sums of an evaluation's loss terms; no metric's name has a space in it."""


def weighted_loss(loss: Loss, totals: Totals) -> Tensor:
    """This micro-batch's addend of the step's loss: the sum of `weight * sum / total(per)`, a
    scalar.

    A total of zero (no such thing in the whole step) gives an addend of zero that still has a
    graph.
    """
    addends = [
        term.sum * (term.weight / (total_of(term.per, totals) or 1.0)) for term in loss.terms
    ]
    return torch.stack(addends).sum()


def total_of(per: str, totals: Totals) -> float:
    """The count `per` over the whole step and all ranks."""
    try:
        return totals[per]
    except KeyError:
        known = ", ".join(sorted(totals))
        raise RLHFError(
            f"a loss or metric is per {per!r}, which nobody counts: known are {known}"
        ) from None


def poison_unless_finite(loss: Tensor) -> Tensor:
    """The loss unchanged, with a gradient of nan if it is not finite: the backend's own check of
    the gradient then sees it, and no extra look at the host is needed."""
    factor = torch.where(torch.isfinite(loss.detach()), 1.0, torch.nan)
    return loss * factor


class Sums:
    """Running sums of one step or one evaluation on the device; reduced over ranks once, read
    later."""

    def __init__(self, mesh: Mesh) -> None:
        self._mesh = mesh
        self._sums: dict[str, Tensor] = {}
        self._per: dict[str, str] = {}
        self.losses: list[Tensor] = []
        """The weighted loss of every micro-batch of this rank, detached scalars."""

    def add(self, loss: Loss, weighted: Tensor) -> None:
        """Count one micro-batch."""
        self.losses.append(weighted.detach())
        self._add("loss", "", weighted.detach())
        for name, (value, per) in loss.metrics.items():
            self._add(name, per, value.detach())

    def add_terms(self, loss: Loss) -> None:
        """Count one micro-batch of an evaluation, whose totals are known only at its end."""
        for number, term in enumerate(loss.terms):
            self._add(f"{TERM}{number}", term.per, term.sum * term.weight)
        for name, (value, per) in loss.metrics.items():
            self._add(name, per, value.detach())

    def _add(self, name: str, per: str, value: Tensor) -> None:
        value = value.double() if value.device.type != "mps" else value.float()
        if name not in self._sums:
            self._sums[name] = value
        elif per in (LEAST, MOST):
            smaller = torch.minimum if per == LEAST else torch.maximum
            self._sums[name] = smaller(self._sums[name], value)
        else:
            self._sums[name] = self._sums[name] + value
        self._per[name] = per

    def reduce(self, totals: Totals) -> "Report":
        """Reduce over all ranks and start the copy to the host. Collective: one sum, and one
        maximum where there are extremes."""
        extremes = {LEAST: -1.0, MOST: 1.0}
        names = sorted(self._sums, key=lambda name: self._per[name] in extremes)
        parts = [self._sums[name] * extremes.get(self._per[name], 1.0) for name in names]
        num_sums = sum(self._per[name] not in extremes for name in names)
        values = self._mesh.sum(_flat(parts[:num_sums]))
        if num_sums < len(names):
            values = torch.cat([values, self._mesh.max(_flat(parts[num_sums:]))])
        shapes = {name: part.shape for name, part in zip(names, parts, strict=True)}
        return Report(Deferred(values), shapes, dict(self._per), totals)


class Report:
    """The reduced sums of one step or evaluation, on their way to the host."""

    def __init__(
        self,
        values: Deferred,
        shapes: Mapping[str, torch.Size],
        per: Mapping[str, str],
        totals: Totals,
    ) -> None:
        self._values, self._shapes, self._per, self._totals = values, shapes, per, totals

    def read(self, derive: Derive) -> dict[str, float]:
        """Metrics by name: the loss, every `sum / total(per)`, the extremes, and what `derive`
        makes of the plain sums (a list for a sum with a dimension)."""
        sums = self._read()
        metrics = {"loss": 0.0}
        for name, value in sums.items():
            per = self._per[name]
            if per in (LEAST, MOST):
                metrics[name] = value
                continue
            mean = value / (total_of(per, self._totals) or 1.0) if per else value
            if name == "loss" or name.startswith(TERM):
                metrics["loss"] += mean
            elif per:
                metrics[name] = mean
        return metrics | dict(derive(sums))

    def _read(self) -> dict[str, Any]:
        """Each sum by its name; a maximum of the negative is a minimum."""
        flat = self._values.read()
        sums: dict[str, Any] = {}
        start = 0
        for name, shape in self._shapes.items():
            part = flat[start : start + shape.numel()]
            start += shape.numel()
            sums[name] = part if len(shape) else part[0]
        return {name: -value if self._per[name] == LEAST else value for name, value in sums.items()}


def _flat(parts: Sequence[Tensor]) -> Tensor:
    return torch.cat([part.reshape(-1) for part in parts])
