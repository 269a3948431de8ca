"""The order of a run: which micro-batches this rank sees in which step."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from attrs import field, frozen
from numpy.typing import NDArray

from rlhf.config.sections import Config
from rlhf.data.batch import PackedBatch
from rlhf.data.examples import Examples, Packable
from rlhf.data.layout import Rows, costs, layout, steps
from rlhf.data.packing import pack

if TYPE_CHECKING:
    from rlhf.engine import Mesh
    from rlhf.trainer import Trainer

ROUND_ON_ACCELERATOR = 128
"""T is rounded up to a multiple of this: whole blocks of flex attention."""
SURVEY_STREAM = 1
"""Keeps what a survey draws apart from the order of rows, which is drawn from seed and epoch."""


@frozen(kw_only=True)
class StepPlan:
    """One optimizer step before any of it is run: the same on every rank, but for `micro`."""

    step: int
    epoch: int
    epoch_done: float
    """Epochs behind us once this step is done."""
    rows: Rows
    """Numbers of the step's examples in its order, over all ranks."""
    lengths: NDArray[np.int64]
    """Tokens of their packed trees."""
    paths: NDArray[np.int64]
    """Tokens of their longest paths."""
    answers: NDArray[np.int64]
    """How many answers each of them has."""
    totals: Mapping[str, float]
    """What the terms of the loss are per, over the whole step and all ranks."""
    layout: Sequence[Sequence[Rows]]
    """Numbers of examples as `[micro][rank]`."""
    micro: Sequence[Rows]
    """This rank's share of it; an empty array is a filler."""
    survey: Sequence["SurveyRows"] = ()
    """This rank's micro-batches of the survey, where it has examples of its own."""

    @property
    def num_batches(self) -> int:
        """How many packed batches the loader gives for this step: the survey's, then the loss's."""
        return len(self.survey) + len(self.micro)


@frozen
class SurveyRows:
    """A micro-batch that only the survey sees."""

    epoch: int
    rows: Rows


@frozen(kw_only=True)
class RunOrder:
    """The whole course of a run over its examples; any step can be asked for, nothing is kept but
    an epoch's order."""

    examples: Examples
    size: int
    """Examples per optimizer step over all ranks."""
    tokens: int
    """Tokens per micro-batch."""
    seed: int = 0
    shuffle: bool = True
    rank: int = 0
    ranks: int = 1
    round_to: int = 1
    """T of a micro-batch is rounded up to a multiple of this, within the budget."""
    trainer: "Trainer | None" = field(default=None, repr=False)
    """Says what its survey sees, if it is asked."""
    _epochs: dict[int, list[Rows]] = field(factory=dict, init=False, repr=False)
    _surveyed: dict[int, Packable] = field(factory=dict, init=False, repr=False)

    @classmethod
    def for_training(
        cls, examples: Examples, config: Config, mesh: "Mesh", trainer: "Trainer | None" = None
    ) -> "RunOrder":
        """A new order of rows in every epoch, from `train.seed`."""
        return cls._of(examples, config, mesh, trainer, shuffle=True)

    @classmethod
    def for_evaluation(
        cls, examples: Examples, config: Config, mesh: "Mesh", trainer: "Trainer | None" = None
    ) -> "RunOrder":
        """Every row once, as they stand."""
        return cls._of(examples, config, mesh, trainer, shuffle=False)

    @classmethod
    def _of(
        cls,
        examples: Examples,
        config: Config,
        mesh: "Mesh",
        trainer: "Trainer | None",
        *,
        shuffle: bool,
    ) -> "RunOrder":
        return cls(
            examples=examples,
            size=config.batch.size,
            tokens=config.batch.budget,
            seed=config.train.seed,
            shuffle=shuffle,
            rank=mesh.rank,
            ranks=mesh.world,
            round_to=1 if mesh.device.type == "cpu" else ROUND_ON_ACCELERATOR,
            trainer=trainer,
        )

    @property
    def steps_per_epoch(self) -> int:
        return -(-len(self.examples) // self.size)

    def step(self, number: int) -> StepPlan:
        """The plan of step `number`, counted from 0 over all epochs."""
        epoch, place = divmod(number, self.steps_per_epoch)
        rows = self._epoch(epoch)[place]
        numbers = self._laid(self.examples, rows)
        counts = self.examples.counts
        surveyed = self.surveyed(epoch)
        own = surveyed is not self.examples
        return StepPlan(
            step=number,
            epoch=epoch,
            epoch_done=epoch + (place + 1) / self.steps_per_epoch,
            rows=rows,
            lengths=self.examples.lengths[rows],
            paths=self.examples.longest_path[rows],
            answers=counts["answers"][rows],
            totals={name: float(count[rows].sum()) for name, count in counts.items()},
            layout=numbers,
            micro=[micro[self.rank] for micro in numbers],
            survey=[
                SurveyRows(epoch, micro[self.rank])
                for micro in (self._laid(surveyed, rows) if own else ())
            ],
        )

    def micro_batches(
        self, first_step: int = 0, last_step: int | None = None
    ) -> Iterator[Rows | SurveyRows]:
        """This rank's micro-batches from `first_step` on, without an end or up to `last_step`
        (exclusive)."""
        number = first_step
        while last_step is None or number < last_step:
            plan = self.step(number)
            yield from plan.survey
            yield from plan.micro
            number += 1

    def packed(self, rows: Rows | SurveyRows) -> PackedBatch:
        """One micro-batch of the plan."""
        examples: Any = self.examples
        if isinstance(rows, SurveyRows):
            examples, rows = self.surveyed(rows.epoch), rows.rows
        return pack(examples, rows.tolist(), round_to=self.round_to, at_most=self.tokens)

    def surveyed(self, epoch: int) -> Packable:
        """The examples that the survey sees in this epoch: those of the loss where it has no
        others, or where a rollout makes them."""
        if self.trainer is None or self.trainer.needs_rollout() or not self.trainer.needs_survey():
            return self.examples
        if epoch not in self._surveyed:
            draw = np.random.Generator(np.random.PCG64([self.seed, epoch, SURVEY_STREAM]))
            self._surveyed.clear()
            self._surveyed[epoch] = self.trainer.survey_examples(self.examples, draw)
        return self._surveyed[epoch]

    def row_names(self, numbers: Iterable[int]) -> str:
        """Where examples came from, for error texts."""
        return self.examples.names(numbers)

    def _laid(self, examples: Packable, rows: Rows) -> list[list[Rows]]:
        """Numbers of examples as `[micro][rank]`."""
        lengths, paths = examples.lengths[rows], examples.longest_path[rows]
        laid = layout(lengths, self.ranks, self.tokens, costs(lengths, paths))
        return [[rows[positions] for positions in micro] for micro in laid]

    def _epoch(self, epoch: int) -> list[Rows]:
        if epoch not in self._epochs:
            self._epochs.clear()
            self._epochs[epoch] = steps(
                len(self.examples), self.size, self.seed, epoch, shuffle=self.shuffle
            )
        return self._epochs[epoch]
