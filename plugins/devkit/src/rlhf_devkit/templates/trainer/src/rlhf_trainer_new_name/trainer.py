"""Focal loss (arXiv 1708.02002) of the tokens of an answer: -(1 - p)^gamma log p."""

import torch
from torch import Tensor

from rlhf.readouts import token_logprobs
from rlhf.trainer import Example, Loss, PackedBatch, Row, Run, Term, Trainer
from rlhf_trainer_new_name import NewNameConfig


class NewName(Trainer):
    row_format = "demonstration"
    config: NewNameConfig

    def example(self, row: Row) -> Example:
        return Example(row.prompt, row.answers)

    def setup(self, run: Run) -> None:
        self.policy = run.load("policy")

    def loss(self, batch: PackedBatch) -> Loss:
        logprobs = self.policy(batch, token_logprobs)["logprobs"]
        losses = focal(logprobs, self.config.gamma)
        probability = logprobs.detach().exp().sum()
        return Loss((Term(losses.sum(), per="tokens"),), {"probability": (probability, "tokens")})


def focal(logprobs: Tensor, gamma: float) -> Tensor:
    """Return the loss of each token [N] from its log-probability [N]."""
    # Below 1e-6 the derivative of a power under 1 would be infinite.
    return -(-torch.expm1(logprobs)).clamp(min=1e-6).pow(gamma) * logprobs
