"""The order of a run: the micro-batches that this rank sees in each step."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import attrs
import numpy as np
import torch
from attrs import field, frozen
from numpy.typing import NDArray

from rlhf.config.sections import Config
from rlhf.data.batch import PackedBatch
from rlhf.data.example import Example, longest_path, num_tokens
from rlhf.data.examples import Examples, Packable
from rlhf.data.layout import Rows, costs, layout, steps
from rlhf.data.packing import PER_TOKEN, divided, num_labels, num_predictions, pack, value_kinds
from rlhf.errors import RLHFError

Made = TypeVar("Made")
ROUND_ON_ACCELERATOR = 128
"""T is rounded up to a multiple of this: whole tiles of tree attention's kernel."""
NO_GRADIENT_FACTOR = 4
"""The survey and the pass that fills a cache keep no activations, so they take so many times the
tokens of a training micro-batch (benchmarks/NOTES.md, Larger micro-batches without gradient)."""
SURVEY_TOKENS = 32_768
"""Tokens of a micro-batch beyond which a survey gains nothing (benchmarks/NOTES.md, Larger
micro-batches without gradient)."""
SURVEY_STREAM = 1
"""Separates the survey's random numbers from the order of rows, which is drawn from seed and
epoch."""


def survey_draw(seed: int, epoch: int) -> np.random.Generator:
    """Return the generator from which the survey's examples of an epoch are drawn."""
    return np.random.Generator(np.random.PCG64([seed, epoch, SURVEY_STREAM]))


def rounding_on(device: torch.device) -> int:
    """Return the multiple to which T is rounded up on a device."""
    return 1 if device.type == "cpu" else ROUND_ON_ACCELERATOR


@frozen(kw_only=True)
class StepPlan:
    """One optimizer step before it runs: the same on every rank except for `micro` and `survey`."""

    step: int
    epoch: int
    epoch_done: float
    """Epochs completed after this step."""
    rows: Rows
    """Numbers of the step's examples, over all ranks, in the order of the step."""
    lengths: NDArray[np.int64]
    """Tokens of their packed trees."""
    paths: NDArray[np.int64]
    """Tokens of their longest paths."""
    answers: NDArray[np.int64]
    """Number of answers of each."""
    totals: Mapping[str, float]
    """The counts that terms of the loss are divided by, over the whole step and all ranks."""
    layout: Sequence[Sequence[Rows]]
    """Numbers of examples as `[micro][rank]`."""
    micro: Sequence[Rows]
    """This rank's share of `layout`; an empty array is a filler."""
    survey: Sequence["SurveyRows"] = ()
    """This rank's micro-batches for the survey; empty if it sees those of the loss."""
    survey_layout: Sequence[Sequence[Rows]] = ()
    """Those of all ranks, as `[micro][rank]`."""

    @property
    def num_batches(self) -> int:
        """How many batches the loader returns for this step: the survey's, then the loss's."""
        return len(self.survey) + len(self.micro)


@frozen
class SurveyRows:
    """A micro-batch that only the survey sees."""

    epoch: int
    rows: Rows


@frozen(kw_only=True)
class RunOrder:
    """The steps of a run over its examples. Any can be planned, by any thread."""

    examples: Examples
    config: Config
    shuffle: bool = True
    """Whether each epoch has a new order, by `train.seed`; else it is that of the files."""
    rank: int = 0
    ranks: int = 1
    round_to: int = 1
    """T of a micro-batch is rounded up to a multiple of this, within the budget."""
    draw_survey: Callable[[Examples, np.random.Generator], Packable] | None = None
    """`Trainer.survey_examples`. None without a survey, and with a rollout, whose examples it sees.
    """
    fixed_survey: Packable | None = None
    """What the survey sees in every epoch, if a cache has values of it."""
    _epochs: dict[int, list[Rows]] = field(factory=dict, init=False, repr=False)
    _surveyed: dict[int, Packable] = field(factory=dict, init=False, repr=False)

    @property
    def steps_per_epoch(self) -> int:
        """Optimizer steps of one epoch; the last may be smaller."""
        return -(-len(self.examples) // self.config.batch.size)

    def step(self, number: int) -> StepPlan:
        """Return the plan of step `number`, counted from 0 over all epochs."""
        epoch, place = divmod(number, self.steps_per_epoch)
        rows, counts, surveyed = self.rows(number), self.examples.counts, self.surveyed(epoch)
        numbers = self._lay_out(self.examples, rows, self._budget)
        seen: list[list[Rows]] = []
        if surveyed is not None and (surveyed is not self.examples or len(numbers) > 1):
            most = max(self._survey_budget, int(surveyed.lengths[rows].max()))
            seen = self._lay_out(surveyed, rows, most)
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
            survey=[SurveyRows(epoch, micro[self.rank]) for micro in seen],
            survey_layout=seen,
        )

    def rows(self, number: int) -> Rows:
        """Return the numbers of the examples of step `number`, counted from 0 over all epochs."""
        epoch, place = divmod(number, self.steps_per_epoch)

        def drawn() -> list[Rows]:
            size, seed = self.config.batch.size, self.config.train.seed
            return steps(len(self.examples), size, seed, epoch, shuffle=self.shuffle)

        return _kept(self._epochs, epoch, drawn)[place]

    def step_of(
        self, examples: Sequence[Example], rows: Rows, number: int = 0, *, passes: int = 1
    ) -> tuple[StepPlan, list[PackedBatch]]:
        """Return the plan of step `number` on `examples` in place of `rows` of the data, and this
        rank's micro-batches. An epoch has `passes` steps for each of the data. An example that is
        larger than the budget is divided, so that its number occurs several times."""
        divisions = [divided(example, self._budget) for example in examples]
        parts = [part for division in divisions for part in division]
        numbers = np.repeat(rows, [len(division) for division in divisions])
        lengths, paths = sizes_of(parts)
        positions = self._positions(lengths, paths, self._budget)
        own = [by_rank[self.rank] for by_rank in positions]
        per_epoch = self.steps_per_epoch * passes
        totals = sums_of_values(examples) | {
            "examples": len(examples),
            "answers": sum(len(example.answers) for example in examples),
            "tokens": sum(sum(num_predictions(example)) for example in examples),
            "labels": sum(num_labels(example) for example in examples),
        }
        lengths, paths = sizes_of(examples)
        plan = StepPlan(
            step=number,
            epoch=number // per_epoch,
            epoch_done=(number + 1) / per_epoch,
            rows=rows,
            lengths=lengths,
            paths=paths,
            answers=np.array([len(example.answers) for example in examples]),
            totals={name: float(total) for name, total in totals.items()},
            layout=[[numbers[places] for places in by_rank] for by_rank in positions],
            micro=[numbers[places] for places in own],
        )
        return plan, [
            attrs.evolve(
                self._pack(parts, places, self._budget), rows=tuple(numbers[places].tolist())
            )
            for places in own
        ]

    def micro_batches(self, numbers: Iterable[int]) -> Iterator[Rows | SurveyRows]:
        """Yield this rank's micro-batches of the steps `numbers`."""
        for number in numbers:
            plan = self.step(number)
            yield from plan.survey
            yield from plan.micro

    def __getitem__(self, rows: Rows | SurveyRows) -> PackedBatch:
        """Return one micro-batch of the plan, packed."""
        if isinstance(rows, SurveyRows):
            return self._pack(self.surveyed(rows.epoch), rows.rows, self._survey_budget)
        return self._pack(self.examples, rows, self._budget)

    def surveyed(self, epoch: int) -> Packable | None:
        """Return the examples that the survey sees in this epoch: those of the loss unless the
        trainer has others. None if `draw_survey` is."""
        draw = self.draw_survey
        if draw is None or self.fixed_survey is not None:
            return self.fixed_survey if draw else None
        numbers = survey_draw(self.config.train.seed, epoch)
        return _kept(self._surveyed, epoch, lambda: draw(self.examples, numbers))

    @property
    def _budget(self) -> int:
        """Tokens of a micro-batch."""
        return self.config.batch.budget

    @property
    def _survey_budget(self) -> int:
        """Tokens of a micro-batch that only the survey sees, unless an example is longer."""
        return max(self._budget, min(NO_GRADIENT_FACTOR * self._budget, SURVEY_TOKENS))

    def _pack(self, examples: Any, rows: Rows, tokens: int) -> PackedBatch:
        return pack(examples, rows.tolist(), round_to=self.round_to, at_most=tokens)

    def _lay_out(self, examples: Packable, rows: Rows, tokens: int) -> list[list[Rows]]:
        """Return numbers of examples as `[micro][rank]`."""
        positions = self._positions(examples.lengths[rows], examples.longest_path[rows], tokens)
        return [[rows[place] for place in micro] for micro in positions]

    def _positions(
        self, lengths: NDArray[np.int64], paths: NDArray[np.int64], tokens: int
    ) -> list[list[Rows]]:
        """Return positions within a step as `[micro][rank]`."""
        return layout(lengths, self.ranks, tokens, costs(lengths, paths))


def sizes_of(examples: Sequence[Example]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the tokens of each tree and those of its longest path."""
    return np.array([*map(num_tokens, examples)]), np.array([*map(longest_path, examples)])


def sums_of_values(examples: Sequence[Example]) -> dict[str, float]:
    """Return the sum over the examples of each value per example or answer. Raises RLHFError for
    the name of a count."""
    names = [name for name, kind in value_kinds(examples).items() if kind != PER_TOKEN]
    for name in {"examples", "answers", "tokens", "labels"} & {*names}:
        raise RLHFError(f"rollout() returned a value {name!r}, a count of core; rename it")
    return {name: float(sum(np.sum(each.values[name]) for each in examples)) for name in names}


def _kept(kept: dict[int, Made], epoch: int, make: Callable[[], Made]) -> Made:
    """Return what is kept of an epoch, made if needed. Two epochs are kept: a thread that packs
    ahead comes to the next one before the step does."""
    value = kept.get(epoch)
    if value is None:
        value = kept[epoch] = make()
        for other in [*kept]:
            if abs(other - epoch) > 1:
                kept.pop(other, None)
    return value
