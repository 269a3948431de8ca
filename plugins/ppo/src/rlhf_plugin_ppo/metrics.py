"""What a run of this trainer reports of its critic, beside what all on-policy trainers do."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from rlhf_rollouts.metrics import Metrics

MOMENTS = "value_moments"


def of_critic(losses: Tensor, clipped: Tensor, old: Tensor, returns: Tensor) -> Metrics:
    """Return metrics of the values of the predictions [N]."""
    errors = (returns - old).double()
    exact = returns.double()
    sums = [exact.new_tensor(len(exact)), errors.sum(), errors.square().sum()]
    sums += [exact.sum(), exact.square().sum()]
    return {
        "value_loss": (losses.sum(), "tokens"),
        "clip_ratio/value": (clipped.float().sum(), "tokens"),
        "values/mean": (old.sum(), "tokens"),
        "returns/mean": (returns.sum(), "tokens"),
        MOMENTS: (torch.stack(sums), ""),
    }


def explained_variance(sums: Mapping[str, Any]) -> dict[str, float]:
    """Return 1 - Var(R - V) / Var(R) over the tokens, with V before the updates of the rollout; 0
    if all returns are equal. Nothing in an evaluation."""
    if MOMENTS not in sums:
        return {}
    count, error, error_squares, total, squares = sums[MOMENTS]
    unexplained = error_squares - error * error / max(count, 1)
    spread = squares - total * total / max(count, 1)
    return {"explained_variance": 1 - unexplained / spread if spread > 0 else 0.0}
