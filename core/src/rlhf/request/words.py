"""The words after `rlhf run NAME`: a YAML file, `--section.field value` and three flags."""

import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import yaml
from attrs import frozen

from rlhf.errors import RLHFError, nearest
from rlhf.request.settings_tree import flow, parse_yaml

_FLAGS: dict[str, tuple[str, str, Callable[[str], Any]]] = {
    "nproc": ("a number of processes", r"0*[1-9][0-9]{0,3}", int),
    "resume": ("step-N or no value", r"(step-[0-9]+)?", str),
    "overwrite": ("no value", r"", lambda _: True),
}
"""What a flag expects in words and as a pattern, and how its value is parsed."""
_TAKES = {"overwrite": r"(?!)", "resume": r"step-(?!.*\.ya?ml$)"}
"""What the next word must match to be a flag's value; other flags take any word but an option."""


@frozen(kw_only=True)
class Words:
    """The parsed words of a command line."""

    source: Path | None = None
    overrides: tuple[tuple[str, Any], ...] = ()
    """Dotted name and parsed value, in order."""
    nproc: int | None = None
    resume: str | None = None
    """`step-N`, or "" for the newest checkpoint."""
    overwrite: bool = False


def parse_words(words: Sequence[str]) -> Words:
    """Parse the words; hyphens in names mean underscores, values are YAML. Raises RLHFError for a
    word that is not expected."""
    parsed: dict[str, Any] = {}
    overrides = []
    for name, value in _pairs(list(words)):
        if name in _FLAGS:
            expects, pattern, read = _FLAGS[name]
            if not re.fullmatch(pattern, value or ""):
                given = f", got {value!r}" if value else ""
                raise RLHFError(f"--{name} expects {expects}{given}")
            parsed[name] = read(value or "")
        elif name:
            overrides.append((name, _parse(name, value)))
        elif not str(value).endswith((".yaml", ".yml")):
            advice = "pass data with --data, a model with --model"
            raise RLHFError(
                f"'{value}' is not a YAML file: its name must end with .yaml or .yml; {advice}"
            )
        elif "source" in parsed:
            first = parsed["source"]
            raise RLHFError(f"unexpected argument '{value}': the config file is already {first}")
        else:
            parsed["source"] = Path(str(value))
    if {"resume", "overwrite"} <= parsed.keys():
        raise RLHFError("--resume continues a run and --overwrite replaces it; pass only one")
    return Words(overrides=tuple(overrides), **parsed)


def option(name: str, value: Any) -> str:
    """Return the word that sets a setting to `value`, plain data or paths. Raises RLHFError for
    other values."""
    try:
        return f"--{name}={flow([value])}"
    except yaml.representer.RepresenterError as error:
        kind = type(error.args[-1]).__name__
        raise RLHFError(
            f"{name} contains a {kind}; pass text, numbers, lists and mappings"
        ) from None


def _pairs(words: list[str]) -> Iterator[tuple[str, str | None]]:
    """Yield (name, value) of each option and ("", word) of any other word."""
    while words:
        word = words.pop(0)
        if not word.startswith("--"):
            yield "", word
            continue
        name, equals, value = word[2:].partition("=")
        name = name.replace("-", "_")
        if not re.fullmatch(r"\w+(\.\w+)*", name):
            raise RLHFError(f"'{word}' is not a setting; write --section.field VALUE")
        if equals:
            yield name, value
        elif not words or not re.match(_TAKES.get(name, r"(?!--)"), words[0]):
            yield name, None
        else:
            yield name, words.pop(0)


def _parse(name: str, value: str | None) -> Any:
    if value is None:
        near = nearest(name, ("resume", "overwrite", "help"))
        hint = f"did you mean --{near}?" if near else f"write --{name} VALUE"
        raise RLHFError(f"--{name} needs a value; {hint}")
    plain = not value.startswith(("[", "{", '"', "'"))
    if plain and "#" in value:  # It begins no comment here.
        return value
    try:
        return parse_yaml(value)
    except yaml.YAMLError as error:
        if plain:  # A pattern such as `*.bias` is not an alias here.
            return value
        problem = getattr(error, "problem", None) or "bad YAML"
        raise RLHFError(f"--{name} {value}: the value is not valid YAML ({problem})") from error
