"""The arguments of `vllm serve` and the environment variables that a run needs."""

import json
import os
from collections.abc import Mapping
from pathlib import Path

from rlhf.plugin import Config

INSIDE = Path(__file__).with_name("inside_vllm")
"""The folder of what runs in the server's processes."""
PROGRAM = INSIDE / "rlhf_vllm_serve.py"
"""What starts a server: PARENT and the arguments of `vllm serve`."""
REQUIRED = {
    "VLLM_SERVER_DEV_MODE": "1",
    "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1",
    "VLLM_NO_USAGE_STATS": "1",
}
"""Environment variables without which the server lacks routes."""
OF_LAUNCH = ("model", "port", "arguments", "environment")
"""Settings of a server that the run starts, beside `start_seconds` and `restarts`."""
POLICY = "policy"
"""What a started server calls its model."""
DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
RANKS = (8, 16, 32, 64, 128, 256, 320, 512)
"""Values of --max-lora-rank."""


def server_arguments(config: Config, rank: int | None, *, max_tokens: int) -> list[str]:
    """Return the arguments of `vllm serve` that a run needs, after the model. `rank` is that of the
    adapter that the run trains, None without one."""
    arguments = [
        "--served-model-name", POLICY, "--dtype", DTYPES[config.model.dtype],
        "--max-model-len", str(max_tokens), "--logprobs-mode", "processed_logprobs",
        "--generation-config", "vllm", "--enable-scale-out",
    ]  # fmt: skip
    if config.model.trust_remote_code:
        arguments.append("--trust-remote-code")
    if rank is not None:
        largest = next((size for size in RANKS if size >= rank), rank)
        return [*arguments, "--enable-lora", "--max-loras", "1", "--max-lora-rank", str(largest)]
    transfer = json.dumps({"backend": "rlhf_files"})
    return [*arguments, "--load-format", "dummy", "--weight-transfer-config", transfer]


def server_variables(settings: Mapping[str, str], path: str | None) -> dict[str, str]:
    """Return the environment variables of a server: those of the settings and what it needs, with
    `path` as its PYTHONPATH."""
    parts = os.pathsep.join(filter(None, (str(INSIDE), path)))
    return REQUIRED | dict(settings) | {"PYTHONPATH": parts}
