"""Reward models. This module has the record of the trainer and imports no torch."""

from rlhf.plugin import TrainerPlugin
from rlhf_plugin_rm.config import RMConfig, check

plugin = TrainerPlugin(
    config=RMConfig,
    trainer="rlhf_plugin_rm.trainer:RMTrainer",
    defaults={"optim.lr": 1e-5},
    demo="demo.yaml",
    report="rlhf_plugin_rm.report:report",
    check=check,
)
