"""Kahneman-Tversky optimisation. This module has the record of the trainer and imports no
torch."""

from rlhf.plugin import TrainerPlugin
from rlhf_plugin_kto.config import KTOConfig, check

plugin = TrainerPlugin(
    config=KTOConfig,
    trainer="rlhf_plugin_kto.trainer:KTOTrainer",
    defaults={"optim.lr": 1e-6},
    demo="demo.yaml",
    report="rlhf_plugin_kto.report:report",
    check=check,
)
