"""Proportional odds (McCullagh, 1980): P(rating <= k) = sigmoid(threshold[k] - score)."""

import torch
from rlhf_trainer_ordinal import OrdinalConfig
from torch import Tensor
from torch.nn.functional import logsigmoid, pad, softplus

from rlhf.readouts import Head, scores
from rlhf.trainer import Example, Loss, PackedBatch, Row, Run, Term, Trainer


class Ordinal(Trainer):
    row_format = "rated"
    renders_whole = True
    config: OrdinalConfig

    def example(self, row: Row) -> Example:
        return Example(row.prompt, row.answers, {"rating": [float(row.columns["rating"])]})

    def setup(self, run: Run) -> None:
        extra = {"first": torch.tensor([-1.0]), "gaps": torch.zeros(self.config.levels - 2)}
        self.policy = run.load("policy", task="sequence", extra=extra, dropout=False)

    def loss(self, batch: PackedBatch) -> Loss:
        read = self.policy(batch, scores_and_thresholds)
        found, thresholds = read["scores"], read["thresholds"]
        ratings = batch.values["rating"]
        likelihood = log_likelihood(found, thresholds, ratings.long())
        predicted = 1 + (found.detach()[:, None] > thresholds.detach()).sum(1)
        error = (predicted - ratings).abs().sum()
        return Loss((Term(-likelihood.sum(), per="answers"),), {"mean_error": (error, "answers")})


def scores_and_thresholds(hidden: Tensor, head: Head, batch: PackedBatch) -> dict[str, Tensor]:
    """Read `scores` [A] and the ordered `thresholds` [levels - 1]."""
    gaps = softplus(head.extra["gaps"].float())
    thresholds = head.extra["first"].float() + pad(gaps, (1, 0)).cumsum(0)
    return {**scores(hidden, head, batch), "thresholds": thresholds}


def log_likelihood(found: Tensor, thresholds: Tensor, ratings: Tensor) -> Tensor:
    """Return log P(rating) [A]: log(sigmoid(a) - sigmoid(b)) of the logits a above and b below."""
    edges = pad(pad(thresholds, (1, 0), value=-torch.inf), (0, 1), value=torch.inf)
    above, below = edges[ratings] - found, edges[ratings - 1] - found
    return logsigmoid(above) + logsigmoid(-below) + torch.log1p(-torch.exp(below - above))
