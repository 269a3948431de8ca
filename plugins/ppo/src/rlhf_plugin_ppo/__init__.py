"""Proximal policy optimisation with a critic. This module has the record of the trainer and imports
no torch."""

from rlhf.plugin import TrainerPlugin
from rlhf_plugin_ppo.config import PPOConfig, check

plugin = TrainerPlugin(
    config=PPOConfig,
    trainer="rlhf_plugin_ppo.trainer:PPOTrainer",
    defaults={"optim.lr": 1e-6},
    demo="demo.yaml",
    report="rlhf_rollouts.report:report",
    check=check,
)
