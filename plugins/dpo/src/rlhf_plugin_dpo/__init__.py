"""Direct preference optimisation: the record that the registry reads first."""

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
