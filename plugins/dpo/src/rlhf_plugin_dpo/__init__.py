"""Direct preference optimisation. This module has the record of the trainer and imports no
torch."""

from rlhf.plugin import TrainerPlugin
from rlhf_plugin_dpo.config import DPOConfig, check

plugin = TrainerPlugin(
    config=DPOConfig,
    trainer="rlhf_plugin_dpo.trainer:DPOTrainer",
    defaults={"optim.lr": 1e-6},
    demo="demo.yaml",
    report="rlhf_plugin_dpo.report:report",
    check=check,
)
