"""Implicit language Q-learning. This module has the records of the trainer and of the row format
that it reads, and imports no torch."""

from rlhf.plugin import FormatPlugin, TrainerPlugin
from rlhf_plugin_ilql.config import ILQLConfig

plugin = TrainerPlugin(
    config=ILQLConfig,
    trainer="rlhf_plugin_ilql.trainer:ILQLTrainer",
    defaults={"optim.lr": 5e-5},
    demo="demo.yaml",
    report="rlhf_plugin_ilql.report:report",
)
row_format = FormatPlugin(
    read="rlhf_plugin_ilql.rewarded:rewarded", demo="rlhf_plugin_ilql.demo:rewarded"
)
