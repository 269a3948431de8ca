"""Focal loss on demonstrations. This module has the record of the trainer and imports no torch."""

from attrs import field, frozen, validators

from rlhf.plugin import TrainerPlugin


@frozen(kw_only=True)
class NewNameConfig:
    """Focal loss on demonstrations."""

    gamma: float = field(default=2.0, validator=validators.ge(0))
    """How much less a token counts that is likely already. 0 is supervised fine-tuning."""


plugin = TrainerPlugin(
    config=NewNameConfig,
    trainer="rlhf_trainer_new_name.trainer:NewName",
    defaults={"optim.lr": 2e-5},
    demo="demo.yaml",
)
