"""What `rlhf doctor` shows of generation engines, the configuration that it checks for them, and
the server that `rlhf launch` starts for one."""

from collections.abc import Iterator, Sequence
from typing import Any

import attrs

from rlhf.cli import installed, read_config, setting_name
from rlhf.errors import RLHFError, first_line
from rlhf.hookspecs import Finding
from rlhf.plugin import Config
from rlhf.preview import load_record
from rlhf_tools.jobs import ServerJob


def engine_findings(config: Config | None) -> Iterator[Finding]:
    """Yield what the settings of each installed engine find, those of `config` or else the
    defaults, if their class has a method `diagnose`."""
    for plugin in (each for each in installed() if each.kind == "rollouts"):
        try:
            settings = load_record(plugin).config
            if hasattr(settings, "diagnose"):
                yield from (_section(config, plugin.name) or settings()).diagnose()
        except Exception as error:  # A plugin's code may raise anything.
            yield Finding(
                subject=plugin.name, here=first_line(error), state="optional",
                feature=f"rollouts.engine {plugin.name}", remedy="rlhf plugins check",
            )  # fmt: skip


def engine_server(config: Config) -> ServerJob:
    """Return the server that a job starts for the engine of a configuration, whose class of
    settings has a method `server_job`. Raises RLHFError if it has none."""
    engine = config.rollouts.engine
    settings = _section(config, engine)
    if not hasattr(settings, "server_job"):
        raise RLHFError(
            f"--server-node: a job cannot start a server for rollouts.engine {engine}; remove "
            "--server-node, or choose another engine, such as vllm"
        )
    job: ServerJob = settings.server_job(config)
    return job


def _section(config: Config | None, engine: str) -> Any:
    """Return the settings of an engine in a configuration, or None if it has another engine."""
    if config is None:
        return None
    fields = attrs.fields(type(config.rollouts))
    found = (getattr(config.rollouts, it.name) for it in fields if setting_name(it) == engine)
    return next(found, None)


def read_words(words: Sequence[str]) -> Config:
    """Return the configuration that the words after `rlhf doctor` name: a trainer, perhaps a YAML
    file, and settings; model and data may be missing. Raises RLHFError if they are wrong."""
    name, *rest = words
    return read_config(name, overrides=rest, inputs=False).config
