"""The settings of the engine, which are `rollouts: {engine: vllm, vllm: {...}}`."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from attrs import field, frozen, validators

from rlhf.cli import is_local_host
from rlhf.plugin import Config, RLHFError, check_rules, documented
from rlhf_rollout_vllm.arguments import OF_LAUNCH

if TYPE_CHECKING:
    from rlhf.hookspecs import Finding
    from rlhf_rollout_vllm.job import ServerJob

above_zero: Any = validators.gt(0)
SHARED_MEMORY = "/dev/shm"
START_SECONDS = 600.0
RESTARTS = 3
ADDRESS = ("--host", "--port", "--uds")
"""Arguments of `vllm serve` by which the run would not reach its server."""


@documented
@frozen(kw_only=True)
class VLLMConfig:
    """A vLLM server that runs already (`url`), or that the run starts and ends (`python`)."""

    url: str | None = None
    """Address of a running server, such as http://127.0.0.1:8000, on this host."""
    python: str | None = None
    """Python of an environment with vLLM, such as /envs/vllm/bin/python, by which the run starts a
    server of its own."""
    model: str | None = None
    """Model folder that a started server opens. Default: with LoRA, `model.path`; else a folder
    with the config and the tokenizer of the trained model, whose weights the server gets from the
    run."""
    port: int | None = field(
        default=None,
        validator=validators.optional(validators.and_(validators.ge(1), validators.le(65535))),
    )
    """Port of a started server; default: a free one."""
    arguments: tuple[str, ...] = ()
    """Further arguments of `vllm serve` for a started server, such as
    [--tensor-parallel-size, "2"]. They come last, so they replace those of the run. --host and
    --port are none of them."""
    environment: dict[str, str] = field(factory=dict)
    """Environment variables of a started server, such as {CUDA_VISIBLE_DEVICES: "1"}. Run folders
    record them, so a token is none of them."""
    start_seconds: float = field(default=START_SECONDS, validator=above_zero)
    """Time in which a started server has to answer."""
    restarts: int = field(default=RESTARTS, validator=validators.ge(0))
    """How often the run starts its server again when the server has ended by itself. A resumed run
    counts anew."""
    seconds: float = field(default=600.0, validator=above_zero)
    """Time in which the server has to answer one request, repetitions included."""
    concurrency: int = field(default=128, validator=above_zero)
    """Largest number of answers that are requested at once."""
    folder: str = SHARED_MEMORY
    """Folder for the weights on their way to the server, which must see it under the same path.
    It holds two buckets, or one adapter."""
    bucket_gb: float = field(default=0.25, validator=above_zero)
    """Size of a bucket of weights in gigabytes (10^9 bytes), unless one weight is larger."""
    canary: float | None = field(default=None, validator=validators.optional(above_zero))
    """Largest mean difference per token between the log-probabilities of a text under the server
    and under the trainer, for each of up to four texts after each transfer of weights. Default:
    0.001 in fp32, else 0.05."""
    agreement: float = field(default=0.05, validator=above_zero)
    """Largest mean difference between the log-probabilities that a server gives its tokens in its
    first rollout, and the trainer's own of the same tokens."""

    def __attrs_post_init__(self) -> None:
        launched = [name for name in OF_LAUNCH if getattr(self, name)]
        defaults = {"start_seconds": START_SECONDS, "restarts": RESTARTS}
        launched += [name for name, value in defaults.items() if getattr(self, name) != value]
        names = {argument.partition("=")[0] for argument in self.arguments}
        address = [name for name in ADDRESS if name in names]
        check_rules(
            ("url and python exclude each other: a server runs already, or the run starts it; "
             "remove one", self.url is not None and self.python is not None),
            (f"{', '.join(launched)}: only for a server that the run starts; set python instead of "
             "url, or remove it", self.url is not None and launched),
            (f"url {self.url}: expected http://HOST:PORT",
             self.url is not None and not _is_address(self.url)),
            (f"arguments {', '.join(address)}: the run chooses the address of its server; remove "
             "it, or set port", address),
        )  # fmt: skip

    def server_job(self, config: Config) -> "ServerJob":
        """Return the server that `rlhf launch slurm --server-node` starts for a run."""
        from rlhf_rollout_vllm.job import server_job  # late: start-up time

        return server_job(config, self)

    def diagnose(self) -> "Sequence[Finding]":
        """Return what `rlhf doctor` shows of the environment with vLLM."""
        from rlhf_rollout_vllm.environment import diagnose  # late: start-up time

        return [*diagnose(self.url, self.python, self.environment)]


def _is_address(url: str) -> bool:
    """Return whether a URL is http://HOST or http://HOST:PORT."""
    try:
        address = urlsplit(url)
        has_port = address.port != 0
    except ValueError:
        return False
    is_whole = bool(address.hostname) and address.path in ("", "/")
    return has_port and is_whole and address.scheme == "http"


def check(config: Config) -> None:
    """Raise RLHFError for what the server cannot do. Called before torch is imported."""
    own: VLLMConfig = config.rollouts.vllm  # type: ignore[attr-defined]
    if own.url is None and own.python is None:
        raise RLHFError(
            "rollouts.vllm: no server; set rollouts.vllm.url to the address of one that runs, or "
            "rollouts.vllm.python to the Python of an environment with vLLM, by which the run "
            "starts one"
        )
    if own.python is not None and not Path(own.python).is_file():
        raise RLHFError(
            f"rollouts.vllm.python {own.python}: no such file; set it to the Python of an "
            "environment with vLLM"
        )
    host = urlsplit(own.url or "http://localhost").hostname or ""
    if own.folder == SHARED_MEMORY and not is_local_host(host):
        raise RLHFError(
            f"rollouts.vllm.url {own.url} is another host, which does not see the weights in "
            f"{SHARED_MEMORY}; set rollouts.vllm.folder to a folder that both hosts see (NCCL and "
            "CUDA IPC are not used)"
        )
    if not Path(own.folder).is_dir():
        raise RLHFError(
            f"rollouts.vllm.folder {own.folder}: no such folder; set it to one that the server "
            "sees too"
        )
    if not os.access(own.folder, os.W_OK | os.X_OK):
        raise RLHFError(
            f"rollouts.vllm.folder {own.folder} cannot be written; set it to a folder that can"
        )
