"""What losses make of the ratios of probabilities under two policies."""

import torch
from torch import Tensor

from rlhf_rollouts.settings import Correction

__all__ = ["clipped_gains", "corrections"]


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


def corrections(old: Tensor, drawn: Tensor, settings: Correction) -> Tensor:
    """Return the weights of predictions that were drawn with log-probabilities `drawn` [N], without
    gradient: min(exp(old - drawn), high), or with `mask` the ratio inside low to high and else 0.

    With answers of older weights, `old` is the policy when their training begins, the proximal
    policy of the decoupled objective (arXiv 2110.00641, in asynchronous training arXiv 2505.24298).
    """
    ratio = (old - drawn).exp()
    if settings.kind == "mask":
        return ratio * ((settings.low <= ratio) & (ratio <= settings.high))
    if settings.kind == "truncate":
        return ratio.clamp(max=settings.high)
    return torch.ones_like(ratio)
