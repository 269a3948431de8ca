"""Rewards of answers, for on-policy trainers: functions with the signature of TRL, shipped rules,
servers and reward models. Functions run in processes of their own, each call with a deadline."""

from rlhf_rollouts.rewards.scoring import Rewards, Scores
from rlhf_rollouts.rewards.spec import RewardSpec

__all__ = ["RewardSpec", "Rewards", "Scores"]
