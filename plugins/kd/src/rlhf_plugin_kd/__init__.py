"""Knowledge distillation: the record that the registry reads first."""

from rlhf.plugin import TrainerPlugin
from rlhf_plugin_kd.config import KDConfig, check

plugin = TrainerPlugin(
    config=KDConfig,
    trainer="rlhf_plugin_kd.trainer:KDTrainer",
    defaults={"optim.lr": 1e-5},
    demo="demo.yaml",
    report="rlhf_plugin_kd.report:report",
    check=check,
)
