"""What a training workflow implements: a row becomes a tree, a packed batch becomes a loss."""

import abc
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import numpy as np
from attrs import field, frozen
from torch import Tensor

from rlhf.data.batch import PackedBatch
from rlhf.data.example import Example
from rlhf.data.examples import Examples, Packable


@frozen
class Term:
    """One addend of the loss: `weight * sum / total(per)`."""

    sum: Tensor
    """Scalar: the sum over this micro-batch, never a mean."""
    per: str
    """What it is averaged over, in the whole step and on all ranks: `examples`, `answers`, `tokens`
    (predictions), `labels` (values per token that are given), or a value of the survey."""
    weight: float = 1.0


@frozen
class Loss:
    """What `Trainer.loss` returns for one micro-batch."""

    terms: tuple[Term, ...]
    metrics: Mapping[str, tuple[Tensor, str]] = field(factory=dict)
    """`{name: (sum, per)}`: detached sums; shown as a mean over `per`. With `per` "" the plain
    sum goes to `derive` alone and may have a dimension (a histogram, say). With `per` "min" or
    "max" it is this micro-batch's extreme, and the whole step's is shown."""


class Trainer(abc.ABC):
    """A workflow. Subclasses implement `example`, `setup` and `loss`; the rest is optional."""

    row_format: ClassVar[str | None] = None
    """The row format that core turns into token ids before `example` sees it
    (`rlhf.data.formats`), or None for the raw row."""
    renders_whole: ClassVar[bool] = False
    """Whether a conversation keeps what the chat template writes behind its last turn (a line
    break, often): for models that are read at the end of a whole rendering."""

    def __init__(self, config: Any, tokenizer: Any) -> None:
        self.config = config
        """The trainer's own section."""
        self.tokenizer = tokenizer

    @abc.abstractmethod
    def example(self, row: Any) -> Example:
        """The tree of one row. Runs in worker processes before `setup`; its result is cached."""

    @abc.abstractmethod
    def setup(self, run: Any) -> None:
        """Load the models: `self.policy = run.load("policy")`. A second instance's may be called
        with models that have shapes and no values, before any weight is read
        (`rlhf.memory.rehearsal`)."""

    @abc.abstractmethod
    def loss(self, batch: PackedBatch) -> Loss:
        """Sums and what they are per, for one micro-batch; no means, no `.item()`."""

    def survey(self, batch: PackedBatch) -> Mapping[str, Tensor]:
        """Values per example or per answer of this micro-batch, computed without gradient over the
        whole step before its first loss. Gathered over micro-batches and ranks in the order of
        examples, they stand in `batch.step`."""
        return {}

    def survey_examples(self, examples: Examples, draw: np.random.Generator) -> Packable:
        """What `survey` sees: by default the loss's own examples, in the loss's own micro-batches.

        Another sequence of the same length (`rlhf.data.mismatch.Mismatched`, say) is packed for the
        survey alone under the same budget; what is surveyed of its example i belongs to example i.
        `draw` is new in every epoch and the same on every rank. Runs in the loader's processes too.
        """
        return examples

    def remarks(self, examples: Examples) -> Sequence[str]:
        """What the user should know about the training rows before the first step, a line each."""
        return ()

    def needs_survey(self) -> bool:
        """Whether `survey` is to run: where a trainer has one, unless its settings need none."""
        return type(self).survey is not Trainer.survey

    def rollout(self, examples: Sequence[Example], step: int) -> Sequence[Example]:
        """What the optimizer step `step` (from 0) trains on instead of the examples of its rows:
        one for each, in their order: the door for on-policy methods. Called in training alone,
        before the step is laid out over ranks; every rank gets all of them and must return the
        same. Collective."""
        return examples

    def needs_rollout(self) -> bool:
        """Whether `rollout` is to run: where a trainer has one, unless its settings need none."""
        return type(self).rollout is not Trainer.rollout

    def derive(self, sums: Mapping[str, Any]) -> Mapping[str, float]:
        """Metrics that are no ratio of sums (F1, say), from the step's or evaluation's totals:
        floats, and lists of floats where a sum has a dimension."""
        return {}

    def model_config(self, metrics: Mapping[str, float]) -> Mapping[str, Any]:
        """What the exported model's config.json says beside its own (plain data), given the run's
        newest metrics: how to use its scores, say."""
        return {}

    def state(self) -> dict[str, Any]:
        """What the trainer itself must remember at a checkpoint (plain data and tensors)."""
        return {}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Take back what `state` gave."""
