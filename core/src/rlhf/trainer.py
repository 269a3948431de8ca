"""What a trainer's module imports: the base class, the row as a tree, the batch and the loss."""

import abc
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import numpy as np
from attrs import field, frozen
from torch import Tensor

from rlhf.config.field_docs import documented
from rlhf.data.batch import PackedBatch
from rlhf.data.example import Answer, Example
from rlhf.data.examples import Examples, Packable
from rlhf.data.mismatch import Mismatched
from rlhf.data.stepwise import encode_steps, label_per_token
from rlhf.data.tokens import Row, encode
from rlhf.registry.load import load_own

__all__ = [
    "Answer",
    "Example",
    "Examples",
    "Loss",
    "Mismatched",
    "Packable",
    "PackedBatch",
    "Row",
    "Term",
    "Trainer",
    "encode",
    "encode_steps",
    "label_per_token",
    "load_own",
]


@documented
@frozen
class Term:
    """One addend of the loss: `weight * sum / total(per)`."""

    sum: Tensor
    """Scalar: the sum over this micro-batch, never a mean."""
    per: str
    """The count by which core divides, totalled over the optimizer step and all ranks: `examples`,
    `answers`, `tokens` (predictions), `labels` (values per token that are not nan), or the name of
    a value of the survey, whose sum over the step is then the count."""
    weight: float = 1.0
    """Factor on the term."""


@documented
@frozen
class Loss:
    """The result of `Trainer.loss` for one micro-batch."""

    terms: tuple[Term, ...]
    """The addends of the loss."""
    metrics: Mapping[str, tuple[Tensor, str]] = field(factory=dict)
    """`{name: (sum, per)}` with detached sums; the run reports sum / total(per). The names must be
    the same on all ranks and in all micro-batches. Special values of `per`: with "" only `derive`
    gets the sum, which may have a dimension (a histogram); with "min" or "max" the value is the
    extreme of this micro-batch, and the run reports the extreme of the step."""


class Trainer(abc.ABC):
    """Base class of a training workflow. Subclasses implement `example`, `setup` and `loss`."""

    row_format: ClassVar[str | None] = None
    """The row format that core turns into token ids before it calls `example`: `demonstration`,
    `preference`, `unpaired` or `stepwise`. With None `example` gets the row as a dictionary."""
    renders_whole: ClassVar[bool] = False
    """Whether a conversation keeps what the chat template writes after its last turn, such as a
    line break. True for models that are read at the end of a rendered conversation."""

    def __init__(self, config: Any, tokenizer: Any) -> None:
        self.config = config
        """The trainer's own section of the configuration."""
        self.tokenizer = tokenizer

    @abc.abstractmethod
    def example(self, row: Any) -> Example:
        """Return the tree of one row.

        Called in worker processes before `setup`. The result is cached; the cache is renewed when
        the sources of the trainer's package change.
        """

    @abc.abstractmethod
    def setup(self, run: Any) -> None:
        """Load the models: `self.policy = run.load("policy")`. Collective.

        Core also calls it on a second instance whose models have shapes and no values, to measure
        the memory of a step before it reads any weight.
        """

    @abc.abstractmethod
    def loss(self, batch: PackedBatch) -> Loss:
        """Return the sums of one micro-batch and the counts they are divided by.

        No means and no `.item()`: core divides by the counts of the whole step.
        """

    def survey(self, batch: PackedBatch) -> Mapping[str, Tensor]:
        """Return values per example [E, ...] or per answer [A, ...] of a micro-batch.

        Core calls it without gradient over the whole step, before the first `loss` of the step, and
        in evaluations too. The values of all micro-batches and ranks are in `batch.step`, in the
        order of examples, beside `batch.step["examples"]` and `batch.step["answers"]`: the places
        of this micro-batch's own examples and answers among them.
        """
        return {}

    def needs_survey(self) -> bool:
        """Return whether core calls `survey`: by default, whether the class defines it."""
        return type(self).survey is not Trainer.survey

    def survey_examples(self, examples: Examples, draw: np.random.Generator) -> Packable:
        """Return the examples that `survey` sees: by default those of the loss, in its batches.

        Another sequence of the same length, such as `Mismatched`, is packed for the survey only,
        under the same budget; its i-th example counts for the i-th example of the data. `draw` is
        new in every epoch and the same on every rank. Called in loader processes too.
        """
        return examples

    def remarks(self, examples: Examples) -> Sequence[str]:
        """Return lines about the training rows that the run prints before its first step."""
        return ()

    def rollout(self, examples: Sequence[Example], step: int) -> Sequence[Example]:
        """Return the examples on which optimizer step `step` (from 0) trains: one for each of
        `examples`, the rows of the step, in the same order. This is the hook of on-policy methods.

        Called in training only, before the step is laid out over ranks. Every rank gets all
        examples and must return the same ones. Collective.
        """
        return examples

    def needs_rollout(self) -> bool:
        """Return whether core calls `rollout`: by default, whether the class defines it."""
        return type(self).rollout is not Trainer.rollout

    def derive(self, sums: Mapping[str, Any]) -> Mapping[str, float]:
        """Return metrics that are not a ratio of sums, such as F1, from the totals of a step or an
        evaluation: floats, and lists of floats for sums that have a dimension."""
        return {}

    def model_config(self, metrics: Mapping[str, float]) -> Mapping[str, Any]:
        """Return plain data to add to the exported model's config.json, such as how to use its
        scores. `metrics` are the newest of the run, those of evaluations as `eval/...`."""
        return {}

    def state(self) -> dict[str, Any]:
        """Return what the trainer itself must keep in a checkpoint: plain data and tensors."""
        return {}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Restore what `state` returned."""
