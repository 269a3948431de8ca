"""The trainer with which kits run backends, observers and extensions: the likelihood of answers."""

from rlhf.readouts import summed_logprobs
from rlhf.trainer import Example, Loss, PackedBatch, Row, Run, Term, Trainer


class Likelihood(Trainer):
    row_format = "demonstration"

    def example(self, row: Row) -> Example:
        return Example(row.prompt, row.answers)

    def setup(self, run: Run) -> None:
        self.policy = run.load("policy")

    def loss(self, batch: PackedBatch) -> Loss:
        return Loss((Term(-self.policy(batch, summed_logprobs)["sum"], per="tokens"),))
