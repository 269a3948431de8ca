"""The engine `vllm`: a vLLM server in an environment of its own writes the answers. The trainer's
processes speak to it by HTTP and never import vLLM."""

from rlhf.plugin import RolloutPlugin
from rlhf_rollout_vllm.config import VLLMConfig, check

plugin = RolloutPlugin(engine="rlhf_rollout_vllm.engine:VLLM", config=VLLMConfig, check=check)
