"""The server of a run, started or found, and what it can do. Only rank 0 calls this."""

import copy
import json
import tempfile
import time
import weakref
from pathlib import Path
from typing import Any

from attrs import frozen

from rlhf.engine import Engine
from rlhf.errors import RLHFError
from rlhf.plugin import Config
from rlhf_rollout_vllm.arguments import server_arguments
from rlhf_rollout_vllm.client import MODELS, Client
from rlhf_rollout_vllm.config import VLLMConfig
from rlhf_rollout_vllm.environment import check_environment
from rlhf_rollout_vllm.launch import Server, start, wait_for
from rlhf_rollout_vllm.transfer import Adapter, Transfer, WholeWeights


@frozen(kw_only=True, eq=False)
class Connection:
    """A server that is ready for weights."""

    transfer: Transfer
    server: Server | None
    """The process, if the run has started it."""
    note: str

    def close(self) -> None:
        """End the server, if the run has started it, and remove what was written for it."""
        if self.server is not None:
            self.server.stop()
        self.transfer.remove()


def connect(
    config: Config,
    settings: VLLMConfig,
    engine: Engine,
    tokenizer: Any,
    *,
    max_tokens: int,
    log: Path | None = None,
) -> Connection:
    """Start the server, in place of one that has ended if it has left a `log`, or find the one that
    runs. Raises RLHFError if it cannot serve the run."""
    started, server, url = time.monotonic(), None, settings.url
    if url is None:
        server = launch(config, settings, engine, tokenizer, max_tokens=max_tokens, log=log)
        url = server.url
    explain = (lambda seconds: None) if server is None else server.ended
    client = Client(url, seconds=settings.seconds, explain=explain)
    served, limit = _model_of(client)
    adapter = _adapter(engine)
    if adapter is None:
        transfer: Transfer = WholeWeights(client, served, limit, settings.folder)
    else:
        transfer = Adapter(client, served, limit, settings.folder, config=adapter)
    note = f"rollouts   vLLM at {url}"
    if server is not None:
        note += f", started in {time.monotonic() - started:.0f} s; its log is {server.log}"
    return Connection(transfer=transfer, server=server, note=note)


def launch(
    config: Config,
    settings: VLLMConfig,
    engine: Engine,
    tokenizer: Any,
    *,
    max_tokens: int,
    log: Path | None = None,
) -> Server:
    """Start a server for the trained model, and wait until it answers. It writes to the end of
    `log`, or to a log of its own."""
    assert settings.python is not None
    check_environment(settings.python, settings.environment)
    adapter, model, own = _adapter(engine), settings.model, None
    if model is None and adapter is not None:
        model = config.model.path
        if not Path(model).is_dir():
            raise RLHFError(
                f"model.path {model} is not a folder, so the server cannot open it; set "
                "rollouts.vllm.model to the folder of the base"
            )
    if model is None:
        # It is removed with this object, also if the server does not start.
        own = tempfile.TemporaryDirectory(prefix="rlhf-vllm-model-", ignore_cleanup_errors=True)
        model = str(write_description(engine, tokenizer, Path(own.name)))
    arguments = [model, *server_arguments(config, adapter and adapter.r, max_tokens=max_tokens)]
    server = start(settings, arguments, log or _new_log(config), again=log is not None)
    if own is not None:
        weakref.finalize(server, own.cleanup)
    wait_for(server, seconds=settings.start_seconds)
    return server


def _new_log(config: Config) -> Path:
    output = config.output and Path(config.output)
    folder = output if output and output.is_dir() else Path(tempfile.mkdtemp(prefix="rlhf-vllm-"))
    return folder / "vllm.log"


def write_description(engine: Engine, tokenizer: Any, folder: Path) -> Path:
    """Write what a server needs of the trained model besides its weights."""
    causal = engine.module.causal
    architecture = copy.copy(causal.config)
    architecture.architectures = [type(causal).__name__]
    architecture.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def _model_of(client: Client) -> tuple[str, int]:
    """Return the name of the model that is served, and its limit on tokens."""
    response = client.get(MODELS, once=True)
    try:
        base = next(each for each in response["data"] if each.get("parent") is None)
        return str(base["id"]), int(base["max_model_len"])
    except (LookupError, TypeError, ValueError, AttributeError, StopIteration):
        raise RLHFError(
            f"{client.url}{MODELS} names no model with its max_model_len: "
            f"{json.dumps(response)[:200]}; is this a vLLM server?"
        ) from None


def _adapter(engine: Engine) -> Any:
    """Return peft's config of the adapter that an engine trains, None without one."""
    return getattr(engine.module.model, "peft_config", {}).get("default")
