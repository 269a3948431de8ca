"""Process reward models. This module has the record of the trainer and imports no torch."""

from rlhf.plugin import TrainerPlugin
from rlhf_plugin_prm.config import PRMConfig

plugin = TrainerPlugin(
    config=PRMConfig,
    trainer="rlhf_plugin_prm.trainer:PRMTrainer",
    defaults={"optim.lr": 1e-5},
    demo="demo.yaml",
    report="rlhf_plugin_prm.report:report",
)
