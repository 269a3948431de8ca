"""Reward models: the record that the registry reads first."""

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
