"""Focal loss (arXiv 1708.02002) of the tokens of an answer: -(1 - p)^gamma log p.

rlhf run ./new_name.py:NewName --model MODEL --data ROWS.jsonl
"""

import torch
from attrs import field, frozen, validators

from rlhf.readouts import token_logprobs
from rlhf.trainer import Example, Loss, PackedBatch, Row, Run, Term, Trainer


@frozen(kw_only=True)
class NewNameConfig:
    """Focal loss on demonstrations."""

    gamma: float = field(default=2.0, validator=validators.ge(0))
    """How much less a token counts that is likely already. 0 is supervised fine-tuning."""


class NewName(Trainer):
    row_format = "demonstration"
    config: NewNameConfig

    def example(self, row: Row) -> Example:
        return Example(row.prompt, row.answers)

    def setup(self, run: Run) -> None:
        self.policy = run.load("policy")

    def loss(self, batch: PackedBatch) -> Loss:
        logprobs = self.policy(batch, token_logprobs)["logprobs"]
        # Below 1e-6 the derivative of a power under 1 would be infinite.
        unsure = (-torch.expm1(logprobs)).clamp(min=1e-6)
        losses = -unsure.pow(self.config.gamma) * logprobs
        return Loss((Term(losses.sum(), per="tokens"),))
