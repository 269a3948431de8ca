"""The DeepSpeed backend. Its record is light: a typo in a config is an error before torch is
imported."""

from rlhf.plugin import BackendPlugin
from rlhf_plugin_deepspeed.config import DeepSpeedConfig, check, defaults

plugin = BackendPlugin(
    config=DeepSpeedConfig,
    hooks="rlhf_plugin_deepspeed.backend:DeepSpeedBackend",
    check=check,
    defaults=defaults,
)
