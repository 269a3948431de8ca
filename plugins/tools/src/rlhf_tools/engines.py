"""What `rlhf doctor` shows of generation engines, and the configuration that it checks for them."""

import re
from collections.abc import Iterator, Sequence
from typing import Any

import yaml

from rlhf import read_config
from rlhf.cli import installed, parse_yaml
from rlhf.errors import RLHFError, first_line
from rlhf.hookspecs import Finding
from rlhf.plugin import Config
from rlhf.preview import load_record


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


def _section(config: Config | None, engine: str) -> Any:
    """Return the settings of an engine in a configuration, or None if it has another engine."""
    return config and getattr(config.rollouts, re.sub(r"\W", "_", engine), None)


def read_words(words: Sequence[str]) -> Config:
    """Return the configuration that the words after `rlhf doctor` name: a trainer, perhaps a YAML
    file, and settings. Raises RLHFError if they are wrong."""
    name, *rest = words
    file = rest.pop(0) if rest and not rest[0].startswith("--") else None
    return read_config(name, file=file, overrides=dict(_settings(rest)))


def _settings(words: list[str]) -> Iterator[tuple[str, Any]]:
    """Yield the name and the value of each `--section.field VALUE` or `--section.field=VALUE`."""
    while words:
        name, equals, value = words.pop(0).partition("=")
        if not name.startswith("--") or not (equals or words):
            raise RLHFError(f"unexpected argument '{name}'; write --section.field VALUE after NAME")
        yield name[2:], _parsed(value if equals else words.pop(0))


def _parsed(value: str) -> Any:
    """Return a value of the command line, which is YAML or else text."""
    try:
        return parse_yaml(value)
    except yaml.YAMLError:
        return value
