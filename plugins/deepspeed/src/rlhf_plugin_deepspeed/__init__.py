"""The DeepSpeed backend. Its record imports no torch, so a typo in a config is reported at once."""

from rlhf.plugin import BackendPlugin
from rlhf_plugin_deepspeed.config import DeepSpeedConfig, check, defaults
from rlhf_plugin_deepspeed.kinds import OPTIMIZERS

plugin = BackendPlugin(
    config=DeepSpeedConfig,
    hooks="rlhf_plugin_deepspeed.backend:DeepSpeedBackend",
    check=check,
    defaults=defaults,
    optimizers=OPTIMIZERS,
    tested={
        "stage 0": {"stage": 0},
        "stage 1": {"stage": 1},
        "stage 2": {"stage": 2},
        # Below the threshold, weights stay gathered, and a tiny model would prove nothing.
        "stage 3": {"stage": 3, "persistence_threshold": 0, "frozen": 3},
    },
)
