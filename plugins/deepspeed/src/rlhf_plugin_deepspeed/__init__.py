"""The DeepSpeed backend's record: light, so that a typo in a config is told before torch is
imported."""

from rlhf.plugin import BackendPlugin
from rlhf_plugin_deepspeed.config import DeepSpeedConfig, check

plugin = BackendPlugin(
    config=DeepSpeedConfig, hooks="rlhf_plugin_deepspeed.backend:DeepSpeedBackend", check=check
)
