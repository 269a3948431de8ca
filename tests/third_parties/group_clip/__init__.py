"""PPO's clipped objective with a baseline from the group. The record of the trainer."""

from functools import partial

from attrs import field, frozen, validators

from rlhf.plugin import TrainerPlugin
from rlhf_rollouts.settings import OnPolicyConfig, check_on_policy


@frozen(kw_only=True)
class GroupClipConfig(OnPolicyConfig):
    """PPO-clip (arXiv 1707.06347) without a critic."""

    clip: float = field(default=0.2, validator=[validators.gt(0), validators.lt(1)])
    """The ratio of probabilities counts as at least 1 - clip and at most 1 + clip."""


plugin = TrainerPlugin(
    config=GroupClipConfig,
    trainer="rlhf_trainer_group_clip.trainer:GroupClip",
    defaults={"optim.lr": 1e-6},
    check=partial(check_on_policy, section="group_clip"),
)
