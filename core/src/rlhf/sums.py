"""Sums and what they are per: the only way in which a mean is formed in this system."""

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from rlhf.deferred import Deferred
from rlhf.engine import Mesh
from rlhf.errors import RLHFError
from rlhf.trainer import Loss

Totals = Mapping[str, float]
Derive = Callable[[Mapping[str, float]], Mapping[str, float]]

TERM = "term "
"""Prefix of the sums of an evaluation's loss terms; no metric's name has a space in it."""


def weighted_loss(loss: Loss, totals: Totals) -> Tensor:
    """This micro-batch's addend of the step's loss: the sum of `weight * sum / total(per)`, a
    scalar.

    A total of zero (no such thing in the whole step) gives an addend of zero that still has a
    graph.
    """
    addends = [
        term.sum * (term.weight / max(total_of(term.per, totals), 1.0)) for term in loss.terms
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
        self._sums[name] = self._sums[name] + value if name in self._sums else value
        self._per[name] = per

    def reduce(self, totals: Totals) -> "Report":
        """Add up over all ranks and start the copy to the host. Collective."""
        values = self._mesh.sum(torch.stack(list(self._sums.values())))
        return Report(Deferred(values), dict(self._per), dict(totals))


class Report:
    """The reduced sums of one step or evaluation, on their way to the host."""

    def __init__(self, values: Deferred, per: Mapping[str, str], totals: Totals) -> None:
        self._values, self._per, self._totals = values, per, totals

    def read(self, derive: Derive) -> dict[str, float]:
        """Metrics by name: the loss, every `sum / total(per)`, and what `derive` makes of the plain
        sums."""
        sums = dict(zip(self._per, self._values.read(), strict=True))
        metrics = {"loss": 0.0}
        for name, value in sums.items():
            per = self._per[name]
            mean = value / max(total_of(per, self._totals), 1.0) if per else value
            if name == "loss" or name.startswith(TERM):
                metrics["loss"] += mean
            elif per:
                metrics[name] = mean
        return metrics | dict(derive(sums))
