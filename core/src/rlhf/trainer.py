"""What a training workflow implements: a row becomes a tree, a packed batch becomes a loss."""

import abc
from collections.abc import Mapping
from typing import Any, ClassVar

from attrs import field, frozen
from torch import Tensor

from rlhf.data.batch import PackedBatch
from rlhf.data.example import Example


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
    sum goes to `derive` alone."""


class Trainer(abc.ABC):
    """A workflow. Subclasses implement `example`, `setup` and `loss`; the rest is optional."""

    rows: ClassVar[str | None] = None
    """The row format that core turns into token ids before `example` sees it
    (`rlhf.data.formats`), or None for the raw row."""

    def __init__(self, config: Any, tokenizer: Any) -> None:
        self.config = config
        """The trainer's own section."""
        self.tokenizer = tokenizer

    @abc.abstractmethod
    def example(self, row: Any) -> Example:
        """The tree of one row. Runs in worker processes before `setup`; its result is cached."""

    @abc.abstractmethod
    def setup(self, run: Any) -> None:
        """Load the models: `self.policy = run.load("policy")`."""

    @abc.abstractmethod
    def loss(self, batch: PackedBatch) -> Loss:
        """Sums and what they are per, for one micro-batch; no means, no `.item()`."""

    def survey(self, batch: PackedBatch) -> Mapping[str, Tensor]:
        """Values per example or per answer of this micro-batch, computed without gradient over the
        whole step before its first loss. Gathered over micro-batches and ranks in the order of
        examples, they stand in `batch.step`."""
        return {}

    def derive(self, sums: Mapping[str, float]) -> Mapping[str, float]:
        """Metrics that are no ratio of sums (F1, say), from the step's or evaluation's totals."""
        return {}

    def state(self) -> dict[str, Any]:
        """What the trainer itself must remember at a checkpoint (plain data and tensors)."""
        return {}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Take back what `state` gave."""
