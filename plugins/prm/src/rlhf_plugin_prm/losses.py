"""Losses of process reward models: pure functions of the log-odds of a step being right."""

from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits


def log_odds(scores: Tensor) -> Tensor:
    """scores [..., 2] of wrong and right -> [...]: log p(right) / p(wrong), softmax over the
    two."""
    return scores[..., 1] - scores[..., 0]


def step_loss(odds: Tensor, labels: Tensor) -> Tensor:
    """-(y log p + (1 - y) log(1 - p)) with p = sigmoid(odds), elementwise; ln 2 at odds 0.

    The cross entropy of the two classes wrong and right, with soft labels y from 0 to 1 as they
    are: "Let's Verify Step by Step" (arXiv 2305.20050) and Math-Shepherd (arXiv 2312.08935)
    equation 2, whose soft estimation gives y as the share of rollouts that end well.
    """
    return binary_cross_entropy_with_logits(odds, labels, reduction="none")
