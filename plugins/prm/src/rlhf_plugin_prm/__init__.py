"""Process reward models. This module has the records of the trainer and of the row format that it
reads, and imports no torch."""

from rlhf.plugin import FormatPlugin, TrainerPlugin
from rlhf_plugin_prm.config import PRMConfig

plugin = TrainerPlugin(
    config=PRMConfig,
    trainer="rlhf_plugin_prm.trainer:PRMTrainer",
    defaults={"optim.lr": 1e-5},
    demo="demo.yaml",
    report="rlhf_plugin_prm.report:report",
)
row_format = FormatPlugin(
    read="rlhf_plugin_prm.stepwise:stepwise", demo="rlhf_plugin_prm.demo:stepwise"
)
