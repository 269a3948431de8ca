"""Trainers for tests of the loop: one with a survey, one whose loss is not finite for one row."""

import gc
import os
from typing import Any, ClassVar

import torch

from rlhf.data.batch import PackedBatch
from rlhf.data.example import Example
from rlhf.readouts import answer_logprobs, token_logprobs
from rlhf.trainer import Loss, Term, Trainer


class SurveyTrainer(Trainer):
    """Each answer against the mean of the whole step: not a sum over micro-batches."""

    row_format = "demonstration"
    num_surveys = 0

    def example(self, row: Any) -> Example:
        return Example(row.prompt, row.answers, {"length": float(len(row.answers[0].tokens))})

    def setup(self, run: Any) -> None:
        self.policy = run.load("policy")

    def survey(self, batch: PackedBatch) -> dict[str, torch.Tensor]:
        assert not torch.is_grad_enabled()
        self.num_surveys += 1
        return {
            "logprob": self.policy(batch, answer_logprobs)["logprobs"],
            "length": batch.values["length"],
        }

    def loss(self, batch: PackedBatch) -> Loss:
        own = self.policy(batch, answer_logprobs)["logprobs"]
        mean = batch.step["logprob"].mean()
        now = batch.step["logprob"][batch.step["answers"]]
        assert torch.equal(batch.step["length"][batch.step["examples"]], batch.values["length"])
        # The survey is of the same weights, so it agrees with the pass that has a gradient.
        assert torch.allclose(own, now, atol=1e-4)
        return Loss(
            (Term(((own - mean) ** 2).sum(), per="length"),),
            {
                "spread": ((own.detach() - mean).abs().sum(), "answers"),
                "count": (own.sum() * 0, ""),
            },
        )

    def derive(self, sums: Any) -> dict[str, float]:
        return {"derived": sums["count"] + 1.0}

    def state(self) -> dict[str, Any]:
        return {"num_surveys": self.num_surveys}

    def load_state(self, state: Any) -> None:
        self.num_surveys = state["num_surveys"]


class HoardingTrainer(SurveyTrainer):
    """Holds many objects from its first step on, as a compiler does."""

    frozen: ClassVar[list[int]] = []
    """Objects that Python's collector skips at each loss."""
    held = 50_000

    def setup(self, run: Any) -> None:
        super().setup(run)
        self.frozen.clear()
        self.hoard: list[list[int]] = []

    def loss(self, batch: PackedBatch) -> Loss:
        self.frozen.append(gc.get_freeze_count())
        self.hoard = self.hoard or [[number] for number in range(self.held)]
        return super().loss(batch)


class PoisonedTrainer(Trainer):
    """Not a number for the row whose answer is the longest."""

    row_format = "demonstration"

    def example(self, row: Any) -> Example:
        poison = float("the poisoned row" in str(row.columns))
        return Example(row.prompt, row.answers, {"poison": poison})

    def setup(self, run: Any) -> None:
        self.policy = run.load("policy")

    def loss(self, batch: PackedBatch) -> Loss:
        logprobs = self.policy(batch, token_logprobs)["logprobs"]
        poison = torch.where(batch.values["poison"] > 0, torch.nan, 0.0).sum()
        return Loss((Term(-logprobs.sum() + poison, per="tokens"),))


class GreedyTrainer(Trainer):
    """Wants more memory than there is, as an accelerator would say it."""

    row_format = "demonstration"

    def example(self, row: Any) -> Example:
        return Example(row.prompt, row.answers)

    def setup(self, run: Any) -> None:
        self.policy = run.load("policy")

    def loss(self, batch: PackedBatch) -> Loss:
        if not batch.tokens.is_meta:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        return Loss((Term(-self.policy(batch, token_logprobs)["logprobs"].sum(), "tokens"),))


class UnevenTrainer(Trainer):
    """Gives a metric on the second rank only, in training."""

    row_format = "demonstration"
    in_training = True

    def example(self, row: Any) -> Example:
        return Example(row.prompt, row.answers)

    def setup(self, run: Any) -> None:
        self.policy = run.load("policy")

    def loss(self, batch: PackedBatch) -> Loss:
        logprobs = self.policy(batch, token_logprobs)["logprobs"]
        uneven = self.in_training == torch.is_grad_enabled() and int(os.environ["RANK"]) == 1
        metrics = {"extra": (logprobs.detach().sum(), "tokens")} if uneven else {}
        return Loss((Term(-logprobs.sum(), per="tokens"),), metrics)


class UnevenEvaluationTrainer(UnevenTrainer):
    """Gives a metric on the second rank only, in an evaluation."""

    in_training = False
