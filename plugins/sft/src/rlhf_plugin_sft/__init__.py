"""Supervised fine-tuning. This module has the record of the trainer and imports no torch."""

from rlhf.plugin import TrainerPlugin
from rlhf_plugin_sft.config import SFTConfig

plugin = TrainerPlugin(
    config=SFTConfig,
    trainer="rlhf_plugin_sft.trainer:SFTTrainer",
    defaults={"optim.lr": 2e-5},
    demo="demo.yaml",
    report="rlhf_plugin_sft.report:report",
)
