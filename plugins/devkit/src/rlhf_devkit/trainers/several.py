"""The trainer with which the kit of backends makes real runs: it has every kind of model, so that a
run calls each hook as the runs of other trainers do."""

from typing import Any

import torch
from torch import Tensor, nn

from rlhf.readouts import answer_logprobs
from rlhf.trainer import Example, Loss, PackedBatch, Row, Run, Term, Trainer


def shifted(hidden: Tensor, head: Any, batch: PackedBatch) -> dict[str, Tensor]:
    """Log-probabilities of answers [A], moved by the trainer's own parameter."""
    return {"value": answer_logprobs(hidden, head, batch)["logprobs"] + head.extra["shift"]}


class Several(Trainer):
    """A policy with a parameter of the trainer's own, a frozen reference that follows it, and a
    trained module that predicts their distance from the length of the answer."""

    row_format = "demonstration"

    def example(self, row: Row) -> Example:
        return Example(row.prompt, row.answers)

    def setup(self, run: Run) -> None:
        self.policy = run.load("policy", extra={"shift": torch.zeros(1)}, dropout=False)
        self.reference = run.reference("engine", every=2, mix=0.5)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            critic = nn.Sequential(nn.Linear(1, 8), nn.Tanh(), nn.Linear(8, 1))
        self.critic = run.prepare(critic, "critic")

    def loss(self, batch: PackedBatch) -> Loss:
        known = self.reference.answer_logprobs(batch)
        ratio = self.policy(batch, shifted)["value"] - known
        ones = torch.ones_like(known)[batch.answer]
        lengths = torch.zeros_like(known).index_add(0, batch.answer, ones)
        error = self.critic(lengths[:, None] / 10)[:, 0] - ratio.detach()
        return Loss(
            (
                Term(nn.functional.softplus(-ratio).sum(), per="answers"),
                Term(error.square().sum(), per="answers", role="critic"),
            )
        )
