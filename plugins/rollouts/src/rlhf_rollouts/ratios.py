"""What losses make of the ratios of probabilities under two policies."""

import torch
from torch import Tensor

from rlhf_rollouts.settings import Correction

__all__ = ["clipped_gains", "corrections", "sampling_ratios"]

LARGEST = 20.0
"""The largest logarithm of the ratio of a whole answer, as in verl."""


def clipped_gains(
    ratio: Tensor, advantages: Tensor, *, low: float, high: float, dual: float | None = None
) -> Tensor:
    """Return min(r A, clip(r, 1 - low, 1 + high) A) of each prediction [N], PPO (arXiv 1707.06347
    eq. 7); with `dual` at least dual A for A < 0 (arXiv 1912.09729)."""
    bounded = ratio.clamp(1 - low, 1 + high) * advantages
    gains = torch.minimum(ratio * advantages, bounded)
    if dual is None:
        return gains
    return torch.where(advantages < 0, torch.maximum(gains, dual * advantages), gains)


def corrections(
    old: Tensor, drawn: Tensor, settings: Correction, answer: Tensor, num_answers: int
) -> Tensor:
    """Return the weights of predictions that were drawn with log-probabilities `drawn` [N], without
    gradient: with the ratio r of `sampling_ratios`, min(r, high), or with `mask` r inside low to
    high and else 0. `answer` [N] is the number of the answer to which a prediction belongs.

    With the level sequence these are truncated and masked importance sampling of whole answers
    (richardli.xyz/rl-collapse), `sequence_truncate` and `sequence_mask` of TRL 1.16.

    With answers of older weights, `old` is the policy when their training begins, the proximal
    policy of the decoupled objective (arXiv 2110.00641, in asynchronous training arXiv 2505.24298).
    """
    ratio = sampling_ratios(old, drawn, answer, num_answers, level=settings.level)
    if settings.kind == "mask":
        return ratio * ((settings.low <= ratio) & (ratio <= settings.high))
    if settings.kind == "truncate":
        return ratio.clamp(max=settings.high)
    return torch.ones_like(ratio)


def sampling_ratios(
    old: Tensor, drawn: Tensor, answer: Tensor, num_answers: int, *, level: str
) -> Tensor:
    """Return the ratio of the probabilities in training and in sampling for each prediction [N].

    token: exp(old - drawn). sequence: exp(sum of old - drawn over the predictions of the answer),
    the ratio of the probabilities of the whole answer, the same for all of its predictions.
    """
    difference = old - drawn
    if level == "sequence":
        sums = difference.new_zeros(num_answers).index_add(0, answer, difference)
        # The product of many ratios may be infinite, as would be the mean in metrics.
        difference = sums.clamp(max=LARGEST)[answer]
    return difference.exp()
