"""A reward model of ratings. The records of the trainer and of the row format that it reads."""

from attrs import field, frozen, validators

from rlhf.plugin import FormatPlugin, TrainerPlugin


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
rated = FormatPlugin(read="rlhf_trainer_ordinal.rows:rated", demo="rlhf_trainer_ordinal.rows:demo")
