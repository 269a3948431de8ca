"""The reward of an environment, which is known when its answer has ended."""

from collections.abc import Sequence
from typing import Any

from rlhf_rollouts.rewards.spec import RewardSpec

ENVIRONMENT = "environment_reward"
"""The column with what environments say of answers."""


def spec_of(environment: str) -> RewardSpec:
    """Return the reward of an environment of this class."""
    return RewardSpec(function=f"{__name__}:of_environment", name=environment)


def of_environment(completions: Sequence[Any], **columns: Any) -> list[float | None]:
    """Return what the environments of the answers have said."""
    return list(columns[ENVIRONMENT])
