"""Supervised fine-tuning: the mean negative log-likelihood of the trained tokens.

Departure from common practice: the mean is over all trained tokens of the optimizer step on all
ranks, not a mean of the means of micro-batches, so the curve does not depend on how a step is
split.
"""

from typing import Any

from rlhf.readouts import summed_logprobs
from rlhf.trainer import Answer, Example, Loss, PackedBatch, Run, Term, Trainer


class SFTTrainer(Trainer):
    row_format = "demonstration"

    def example(self, row: Any) -> Example:
        if self.config.train_on == "answers":
            return Example(row.prompt, row.answers)
        (answer,) = row.answers
        return Example([], [Answer([*row.prompt, *answer.tokens])])

    def setup(self, run: Run) -> None:
        self.policy = run.load("policy")

    def loss(self, batch: PackedBatch) -> Loss:
        read = self.policy(batch, summed_logprobs)
        return Loss(
            terms=(Term(-read["sum"], per="tokens"),),
            metrics={
                "entropy": (read["entropy"].sum(), "tokens"),
                "mean_token_accuracy": (read["correct"].sum(), "tokens"),
            },
        )
