"""The survey: values of the whole optimizer step that a loss needs and that are no sums over
micro-batches."""

from collections.abc import Iterator, Mapping, Sequence

import attrs
import numpy as np
import torch
from attrs import define, field
from torch import Tensor

from rlhf.data.batch import PackedBatch
from rlhf.data.order import StepPlan
from rlhf.engine import Mesh
from rlhf.trainer import Trainer

EXAMPLE, ANSWER = "example", "answer"
PLACES = ("examples", "answers")
"""Names in `batch.step` of where this batch's own are in the values of the step."""


@define
class Survey:
    """What a trainer asks about whole steps. Nothing waits for the device, but for one agreement at
    the first step whose answers are not one per example."""

    trainer: Trainer
    mesh: Mesh
    _kinds: dict[str, str] = field(factory=dict)
    """What each surveyed value is per."""

    def take(
        self, batches: Sequence[PackedBatch], plan: StepPlan, *, seen: Sequence[PackedBatch] = ()
    ) -> list[PackedBatch]:
        """The step's micro-batches with every surveyed value in `batch.step`, in the order of
        `plan.rows`.

        `seen` are the micro-batches that the survey sees instead of the loss's own. Beside the
        trainer's own names stand `examples` [E] and `answers` [A]: where this batch's own are in
        these values (the answers if the survey's examples begin with the same ones). Collective.
        """
        seen = seen or batches
        with torch.no_grad():
            found = [dict(self.trainer.survey(batch)) for batch in seen]
        own = {name: torch.cat([values[name] for values in found]) for name in found[0]}
        places = Places(plan)
        kinds = self._agreed(own, places, [places.of(batch) for batch in seen])
        where = places.of(*seen)
        whole = {
            name: self.mesh.sum(spread(values, where[kinds[name]], places.size[kinds[name]]))
            for name, values in own.items()
        }
        return [
            attrs.evolve(batch, step=whole | _indices(places.of(batch), batch)) for batch in batches
        ]

    def _agreed(
        self, own: Mapping[str, Tensor], places: "Places", where: Sequence[Mapping[str, list[int]]]
    ) -> Mapping[str, str]:
        """What each value is per. With one answer for every example it is the same; otherwise a
        rank may have nothing but such examples, and asks the others, once. Collective."""
        if places.single:
            return dict.fromkeys(own, EXAMPLE)
        if own.keys() - self._kinds.keys():
            counts = {kind: sum(len(batch[kind]) for batch in where) for kind in (EXAMPLE, ANSWER)}
            told = {
                name: EXAMPLE if len(values) == counts[EXAMPLE] else ANSWER
                for name, values in own.items()
                if counts[EXAMPLE] != counts[ANSWER]
            }
            for others in self.mesh.gather(told):
                self._kinds |= others
        return self._kinds


class Places:
    """Where the examples and answers of a step stand in its order, known on the host."""

    def __init__(self, plan: StepPlan) -> None:
        self._place = {int(row): place for place, row in enumerate(plan.rows)}
        self._counts = plan.answers
        self._first = np.cumsum(plan.answers) - plan.answers
        self.single = bool((plan.answers == 1).all())
        """Whether every example has one answer."""
        self.size = {EXAMPLE: len(plan.rows), ANSWER: int(plan.answers.sum())}
        """How many there are in the whole step."""

    def of(self, *batches: PackedBatch) -> dict[str, list[int]]:
        """Of the batches' examples and answers, in their order."""
        examples = [self._place[row] for batch in batches for row in batch.rows]
        answers = [
            int(self._first[place]) + number
            for place in examples
            for number in range(int(self._counts[place]))
        ]
        return {EXAMPLE: examples, ANSWER: answers}


def spread(values: Tensor, places: Sequence[int], size: int) -> Tensor:
    """values [n, ...] -> [size, ...], zero but at `places` [n]: such tensors of all ranks add up to
    the whole step's."""
    whole = values.new_zeros(size, *values.shape[1:])
    return whole.index_copy_(0, _on(places, values.device), values.detach())


def _indices(places: Mapping[str, list[int]], batch: PackedBatch) -> dict[str, Tensor]:
    found = (places[EXAMPLE], places[ANSWER])
    return {name: _on(of, batch.tokens.device) for name, of in zip(PLACES, found, strict=True)}


def _on(places: Sequence[int], device: torch.device) -> Tensor:
    """An index on the device; `torch.tensor` with a device would wait for it."""
    return torch.tensor(places, dtype=torch.long).to(device, non_blocking=True)


@define
class StepTotals(Mapping[str, float]):
    """What a term of the loss may be per: the plan's counts, and the total of a surveyed value,
    which is read from the device where a term asks for it alone."""

    known: Mapping[str, float]
    surveyed: Mapping[str, Tensor]

    def __getitem__(self, name: str) -> float:
        return self.known[name] if name in self.known else float(self.surveyed[name].sum())

    def __iter__(self) -> Iterator[str]:
        yield from (*self.known, *(name for name in self.surveyed if name not in PLACES))

    def __len__(self) -> int:
        return len(list(iter(self)))
