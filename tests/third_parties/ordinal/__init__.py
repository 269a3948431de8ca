"""A reward model of ratings. The record of the trainer."""

from attrs import field, frozen, validators

from rlhf.plugin import TrainerPlugin


@frozen(kw_only=True)
class OrdinalConfig:
    """Proportional odds (McCullagh, 1980): a score, and ordered thresholds between ratings."""

    levels: int = field(default=5, validator=validators.ge(3))
    """Number of ratings; they are 1 to this number."""


plugin = TrainerPlugin(
    config=OrdinalConfig,
    trainer="rlhf_trainer_ordinal.trainer:Ordinal",
    defaults={"optim.lr": 1e-5},
)
