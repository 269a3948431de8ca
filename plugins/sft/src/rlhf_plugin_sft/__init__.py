"""Supervised fine-tuning: the record that the registry reads first."""

from rlhf.plugin import TrainerPlugin
from rlhf_plugin_sft.config import SFTConfig

plugin = TrainerPlugin(
    config=SFTConfig,
    trainer="rlhf_plugin_sft.trainer:SFTTrainer",
    defaults={"optim.lr": 2e-5},
    demo="demo.yaml",
    report="rlhf_plugin_sft.report:report",
)
