"""Group relative policy optimisation. This module has the record of the trainer and imports no
torch."""

from rlhf.plugin import TrainerPlugin
from rlhf_plugin_grpo.config import GRPOConfig, check

plugin = TrainerPlugin(
    config=GRPOConfig,
    trainer="rlhf_plugin_grpo.trainer:GRPOTrainer",
    defaults={"optim.lr": 1e-6},
    demo="demo.yaml",
    report="rlhf_rollouts.report:report",
    check=check,
)
