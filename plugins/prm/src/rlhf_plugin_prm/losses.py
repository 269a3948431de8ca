"""Losses of process reward models: pure functions of the log-odds of a step being right."""

from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits


def log_odds(scores: Tensor) -> Tensor:
    """Return log(p(right) / p(wrong)) [...] from the scores of wrong and right [..., 2], with
    their softmax as p."""
    return scores[..., 1] - scores[..., 0]


def step_loss(odds: Tensor, labels: Tensor) -> Tensor:
    """Return -(y log p + (1 - y) log(1 - p)) with p = sigmoid(odds), elementwise; ln 2 at odds 0.

    The cross entropy of the two classes wrong and right with soft labels y from 0 to 1: "Let's
    Verify Step by Step" (arXiv 2305.20050) and Math-Shepherd (arXiv 2312.08935) equation 2, whose
    soft estimation takes as y the share of rollouts that end with the right answer.
    """
    return binary_cross_entropy_with_logits(odds, labels, reduction="none")
