"""What a run of this trainer reports beside what all on-policy trainers do."""

import torch
from torch import Tensor

from rlhf.trainer import PackedBatch
from rlhf_plugin_grpo.presets import Method
from rlhf_rollouts.metrics import Metrics, of_clipping


def of_groups(batch: PackedBatch) -> Metrics:
    """Return how the rewards of groups differ."""
    return {
        "reward_std": (batch.values["reward_std"].sum(), "answers"),
        "frac_reward_zero_std": (batch.values["same_reward"].sum(), "answers"),
    }


def of_ratios(ratio: Tensor, advantages: Tensor, method: Method) -> Metrics:
    """Return how many of the predictions [N] are clipped."""
    below = (ratio < 1 - method.clip_low) & (advantages < 0)
    above = (ratio > 1 + method.clip_high) & (advantages > 0)
    if method.clip_kind != "ppo":
        below, above = torch.zeros_like(below), ratio > 1 + method.clip_high
    if method.clip_kind == "none":
        above = torch.zeros_like(below)
    return of_clipping(below, above)
