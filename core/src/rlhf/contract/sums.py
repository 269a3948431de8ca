"""Sums and what they are divided by: the only way in which a mean is formed in this system."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from attrs import define, field, frozen
from torch import Tensor

from rlhf.devices import Deferred
from rlhf.engine import Mesh
from rlhf.errors import RLHFError, SameOnAllRanks
from rlhf.hookspecs import CORE_METRICS
from rlhf.trainer import Loss

Totals = Mapping[str, float | Tensor]
"""The counts of a whole step over all ranks, and the surveyed values, of which a sum is a count."""
Derive = Callable[[Mapping[str, Any]], Mapping[str, float]]

EXTREMES = {"min": -1.0, "max": 1.0}
"""What a metric is `per` if it is an extreme, and the sign under which it is a maximum."""

TERM = "term "
"""Prefix of the sums of an evaluation's loss terms."""

ROUTER_LOSS = "router_loss"
"""Metric of the policy's load-balancing loss; that of another model ends with its role."""


def weighted_loss(loss: Loss, totals: Totals) -> Tensor:
    """Return this micro-batch's addend of the step's loss, a scalar: the sum of
    `weight * sum / total(per)`.

    A total of zero gives an addend of zero that still has a graph.
    """
    addends = [
        term.sum * (term.weight / (total_of(term.per, totals) or 1.0)) for term in loss.terms
    ]
    return torch.stack(addends).sum()


def by_role(loss: Loss) -> dict[str, Loss]:
    """Return the terms of each role as a loss of its own."""
    terms = loss.terms
    roles = dict.fromkeys(term.role for term in terms)
    return {role: Loss(tuple(term for term in terms if term.role == role)) for role in roles}


def total_of(per: str, totals: Totals) -> float:
    """Return the count `per`; that of a surveyed value is read from the device."""
    total = totals[per]
    return float(total.sum()) if isinstance(total, Tensor) else total


def poison_unless_finite(loss: Tensor, whole: Tensor) -> Tensor:
    """Return the loss unchanged, with a gradient of nan if `whole`, the sum over all roles, is not
    finite: the backend's check of the gradient then sees it, and the host need not read it."""
    return loss * torch.where(torch.isfinite(whole.detach()), 1.0, torch.nan)


class Sums:
    """Running sums of one step or one evaluation on the device; reduced over ranks once, read
    later."""

    def __init__(self, mesh: Mesh) -> None:
        self._mesh = mesh
        self._sums: dict[str, Tensor] = {}
        self._per: dict[str, str] = {}
        self.losses: list[Tensor] = []
        """The weighted loss of every micro-batch of this rank, detached scalars."""
        self.terms: dict[str, str] = {}
        """What each term of the loss is per."""
        self.metrics: dict[str, tuple[str, torch.Size]] = {}
        """What each metric is per, and the shape of its sum."""

    def add(self, loss: Loss, weighted: Tensor) -> None:
        """Add one micro-batch, whose addend of the step's loss is `weighted`."""
        self.losses.append(weighted.detach())
        self._add("loss", "", weighted.detach())
        self.terms |= {f"{TERM}{number}": term.per for number, term in enumerate(loss.terms)}
        self._add_metrics(loss)

    def add_terms(self, loss: Loss) -> None:
        """Add one micro-batch of an evaluation, whose totals are known only at its end."""
        for number, term in enumerate(loss.terms):
            self._add(f"{TERM}{number}", term.per, term.sum * term.weight)
            self.terms[f"{TERM}{number}"] = term.per
        self._add_metrics(loss)

    def reduce(self, totals: Totals) -> "ReducedSums":
        """Reduce over all ranks and start the copy to the host. Collective: one sum, and one
        maximum if there are extremes."""
        # Ranks are added up by position, whatever order their micro-batches had.
        names = sorted(self._sums, key=lambda name: (self._per[name] in EXTREMES, name))
        parts = [self._sums[name] * EXTREMES.get(self._per[name], 1.0) for name in names]
        num_sums = sum(self._per[name] not in EXTREMES for name in names)
        values = self._mesh.data.sum(_flat(parts[:num_sums]))
        if num_sums < len(names):
            values = torch.cat([values, self._mesh.data.max(_flat(parts[num_sums:]))])
        shapes = {name: part.shape for name, part in zip(names, parts, strict=True)}
        return ReducedSums(Deferred(values), shapes, dict(self._per), totals)

    def _add_metrics(self, loss: Loss) -> None:
        for name, metric in loss.metrics.items():
            assert isinstance(metric, tuple), name  # The contract has made tensors of numbers.
            value, per = metric
            self._add(name, per, value)
            self.metrics[name] = (per, value.shape)

    def _add(self, name: str, per: str, value: Tensor) -> None:
        value = value.double()
        if name not in self._sums:
            self._sums[name] = value
        elif per in EXTREMES:
            extreme = torch.minimum if per == "min" else torch.maximum
            self._sums[name] = extreme(self._sums[name], value)
        else:
            self._sums[name] = self._sums[name] + value
        self._per[name] = per


@frozen
class ReducedSums:
    """The reduced sums of one step or evaluation, while they are copied to the host."""

    _values: Deferred
    _shapes: Mapping[str, torch.Size]
    _per: Mapping[str, str]
    _totals: Totals

    def read(self, derive: Derive) -> dict[str, float]:
        """Return metrics by name: the loss, every `sum / total(per)`, the extremes, and what
        `derive` returns for the plain sums (a list for a sum with a dimension)."""
        sums = self._read()
        metrics = {"loss": 0.0}
        for name, per in self._per.items():
            value = sums[name]
            if per in EXTREMES:
                metrics[name] = value
                continue
            mean = value / (total_of(per, self._totals) or 1.0) if per else value
            if name == "loss" or name.startswith(TERM):
                metrics["loss"] += mean
            elif per:
                metrics[name] = mean
        derived = dict(derive(sums))
        for name in sorted(CORE_METRICS & derived.keys()):
            raise RLHFError(f"derive() returns {name!r}, a name that core uses itself; rename it")
        return metrics | derived

    def _read(self) -> dict[str, Any]:
        """Return each sum by its name; the maximum of negated values is turned back."""
        flat = iter(self._values.read())
        sums: dict[str, Any] = {}
        for name, shape in self._shapes.items():
            part = [next(flat) for _ in range(shape.numel())]
            sums[name] = part if len(shape) else part[0]
        return {name: -value if self._per[name] == "min" else value for name, value in sums.items()}


def _flat(parts: Sequence[Tensor]) -> Tensor:
    return torch.cat([part.reshape(-1) for part in parts])


REMEDY = "return it for every micro-batch, also for one without rows"


@define
class NameCheck:
    """The names that `loss` used when this was first called."""

    trainer: str
    mesh: Mesh
    _texts: dict[str, str] | None = field(default=None, init=False)

    def check(self, sums: Sums) -> None:
        """Raise RLHFError if the names differ between ranks or from those of the first call. Only
        the first call is collective."""
        texts = describe(sums)
        if self._texts is None:
            self._share(texts)
        elif texts != self._texts:
            places = {"in the first step": self._texts, "now": texts}
            raise RLHFError(self._text("in every step", places))

    def _share(self, texts: dict[str, str]) -> None:
        shares = self.mesh.gather(texts)
        self._texts = shares[0]
        if any(each != self._texts for each in shares):
            places = {f"on rank {rank}": each for rank, each in enumerate(shares)}
            raise SameOnAllRanks(self._text("on all ranks", places))

    def _text(self, where: str, places: Mapping[str, Mapping[str, str]]) -> str:
        return (
            f"trainer {self.trainer!r}: loss() must name the same terms and metrics {where}, but "
            f"{differences(places)}; {REMEDY}"
        )


def describe(sums: Sums) -> dict[str, str]:
    """Return each name with what it is per and, if its sum has a dimension, its shape."""
    texts = {f"loss {name}": f"per {per!r}" for name, per in sums.terms.items()}
    for name, (per, shape) in sums.metrics.items():
        more = f" of shape {list(shape)}" if shape else ""
        texts[f"metric {name!r}"] = f"per {per!r}{more}"
    return texts


def differences(places: Mapping[str, Mapping[str, str]]) -> str:
    """Return every name that is not the same in all places, with what it is in each."""
    lines = []
    for name in dict.fromkeys(name for texts in places.values() for name in texts):
        by_text: dict[str, list[str]] = {}
        for place, texts in places.items():
            by_text.setdefault(texts.get(name, "missing"), []).append(place)
        if len(by_text) > 1:
            each = (f"{text} {', '.join(where)}" for text, where in by_text.items())
            lines.append(f"{name} is {' and '.join(each)}")
    return "; ".join(lines)
