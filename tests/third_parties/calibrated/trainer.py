"""Cal-DPO (arXiv 2412.14516): -log s(w - l) + lambda ((w - 1/(2b))^2 + (l + 1/(2b))^2), of the
log-ratios of the chosen answer, w, and of the rejected one, l."""

from rlhf_trainer_calibrated import CalibratedConfig
from torch import Tensor
from torch.nn.functional import logsigmoid

from rlhf.readouts import answer_logprobs
from rlhf.trainer import Example, Loss, PackedBatch, Row, Run, Term, Trainer


class Calibrated(Trainer):
    row_format = "preference"
    config: CalibratedConfig

    def example(self, row: Row) -> Example:
        return Example(row.prompt, row.answers)

    def setup(self, run: Run) -> None:
        self.policy = run.load("policy")
        self.reference = run.load("reference", model=run.config.model, trained=False)

    def loss(self, batch: PackedBatch) -> Loss:
        known = self.reference(batch, answer_logprobs)["logprobs"]
        ratios = self.policy(batch, answer_logprobs)["logprobs"] - known
        config = self.config
        losses = calibrated(ratios[0::2], ratios[1::2], config.beta, config.lambda_)
        right = (ratios[0::2] > ratios[1::2]).sum()
        return Loss((Term(losses.sum(), per="examples"),), {"accuracy": (right, "examples")})


def calibrated(chosen: Tensor, rejected: Tensor, beta: float, weight: float) -> Tensor:
    """Return the loss of each pair [E] from the log-ratios of its answers [E]."""
    target = 1 / (2 * beta)
    apart = (chosen - target).square() + (rejected + target).square()
    return weight * apart - logsigmoid(chosen - rejected)
