"""The server of a job: `rlhf launch slurm --server-node` starts it on a host of its own."""

import json
from pathlib import Path
from typing import Any

from attrs import frozen

from rlhf.errors import RLHFError
from rlhf.plugin import Config
from rlhf_rollout_vllm.arguments import OF_LAUNCH, PROGRAM, server_arguments, server_variables

PORT = 8000
"""vLLM's default."""
ANY_HOST = "0.0.0.0"
PARENT = "0"
"""The server ends with the process that has started it."""


@frozen(kw_only=True)
class ServerJob:
    """What a job script needs to start a server and to attach the run to it."""

    command: list[str]
    """Starts the server, which other hosts reach."""
    port: int
    folder: str
    """The folder of its log."""
    seconds: float
    """Time in which it has to answer at the path /health."""
    url_setting: str
    """The setting of the run that gets its address."""
    words: list[str]
    """Further words of the run."""


def server_job(config: Config, settings: Any) -> ServerJob:
    """Return the server of a run with these settings of the engine. Raises RLHFError if a job
    cannot start it."""
    if settings.python is None:
        raise RLHFError(
            f"rollouts.vllm.url {settings.url} is a server that runs already; set "
            "rollouts.vllm.python instead, or remove --server-node"
        )
    if config.model.part == "text" and settings.model is None:
        raise RLHFError(
            "--server-node: with model.part text the server would serve the images of "
            f"{config.model.path} too; set rollouts.vllm.model to an export with model.part text, "
            "or remove --server-node"
        )
    port, folder = settings.port or PORT, f"{Path(str(config.output))}.vllm"
    arguments = server_arguments(config, _rank(config), max_tokens=config.data.max_tokens)
    environment = settings.environment
    variables = server_variables(environment, environment.get("PYTHONPATH"))
    command = [
        "env", *(f"{name}={value}" for name, value in variables.items()),
        settings.python, str(PROGRAM), PARENT, settings.model or str(config.model.path),
        *arguments, "--host", ANY_HOST, "--port", str(port), *settings.arguments,
    ]  # fmt: skip
    return ServerJob(
        command=command, port=port, folder=folder, seconds=settings.start_seconds,
        url_setting="rollouts.vllm.url", words=_words(settings, folder),
    )  # fmt: skip


def _words(settings: Any, folder: str) -> list[str]:
    """Return the words by which a run attaches to a server instead of starting one."""
    default = type(settings)()
    launched = ("python", *OF_LAUNCH, "start_seconds", "restarts")
    values = {name: getattr(default, name) for name in launched}
    words = {
        name: json.dumps(value)
        for name, value in values.items()
        if value != getattr(settings, name)
    }
    if settings.folder == default.folder:
        words["folder"] = folder
    return [word for name, value in words.items() for word in (f"--rollouts.vllm.{name}", value)]


def _rank(config: Config) -> int | None:
    """Return the rank of the adapter that a run trains, None without one."""
    if config.lora is not None:
        return config.lora.rank
    if config.model.adapter is None:
        return None
    file = Path(config.model.adapter, "adapter_config.json")
    try:
        return int(json.loads(file.read_text(encoding="utf-8"))["r"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise RLHFError(
            f"cannot read the rank of model.adapter in {file} ({error}); set model.adapter to a "
            "folder with a LoRA adapter"
        ) from None
