"""Calibrated preference optimisation. The record of the trainer."""

from attrs import field, frozen, validators

from rlhf.plugin import TrainerPlugin


@frozen(kw_only=True)
class CalibratedConfig:
    """Calibrated preference optimisation (arXiv 2412.14516)."""

    beta: float = field(default=0.1, validator=validators.gt(0))
    """Strength of the calibration: log-ratios are pulled to plus and minus 1 / (2 beta)."""
    lambda_: float = field(default=1.0, validator=validators.ge(0))
    """Weight of the calibration."""


plugin = TrainerPlugin(
    config=CalibratedConfig,
    trainer="rlhf_trainer_calibrated.trainer:Calibrated",
    defaults={"optim.lr": 1e-6},
)
