"""The words after `rlhf run NAME`: a YAML file, `--section.field value` and three flags."""

import difflib
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import yaml
from attrs import frozen

from rlhf.errors import RLHFError

_FLAGS: dict[str, tuple[str, str, Callable[[str], Any]]] = {
    "nproc": ("a number of processes", r"0*[1-9][0-9]{0,3}", int),
    "resume": ("step-N or nothing", r"(step-[0-9]+)?", str),
    "overwrite": ("no value", r"", lambda _: True),
}
"""What a flag takes in words and as a pattern, and how it is read."""
_TAKES = {"overwrite": r"(?!)", "resume": r"step-(?!.*\.ya?ml$)"}
"""What the next word must look like to be a flag's value; others take what is no option."""


@frozen(kw_only=True)
class Words:
    """What stood on the command line."""

    source: Path | None = None
    overrides: tuple[tuple[str, Any], ...] = ()
    """Dotted name and parsed value, in order."""
    nproc: int | None = None
    resume: str | None = None
    """`step-N`, or "" for the newest checkpoint."""
    overwrite: bool = False


def parse_words(words: Sequence[str]) -> Words:
    """Hyphens in names mean underscores, values are YAML. RLHFError for a word without a place."""
    found: dict[str, Any] = {}
    overrides = []
    for name, value in _pairs(list(words)):
        if name in _FLAGS:
            takes, pattern, read = _FLAGS[name]
            if not re.fullmatch(pattern, value or ""):
                raise RLHFError(f"--{name} takes {takes}, not {value or 'nothing'!r}")
            found[name] = read(value or "")
        elif name:
            overrides.append((name, _parse(name, value)))
        elif "source" in found:
            raise RLHFError(
                f"'{value}' is one word too many: the configuration is {found['source']}"
            )
        else:
            found["source"] = _source(str(value))
    if {"resume", "overwrite"} <= found.keys():
        raise RLHFError("--resume goes on with a run and --overwrite replaces it: give one of them")
    return Words(overrides=tuple(overrides), **found)


def _pairs(words: list[str]) -> Iterator[tuple[str, str | None]]:
    """(name, value) of each option, ("", word) of a bare word."""
    while words:
        word = words.pop(0)
        if not word.startswith("--"):
            yield "", word
            continue
        name, equals, value = word[2:].partition("=")
        name = name.replace("-", "_")
        if not re.fullmatch(r"\w+(\.\w+)*", name):
            raise RLHFError(f"'{word}' is no setting: write --section.field VALUE")
        if equals:
            yield name, value
        elif not words or not re.match(_TAKES.get(name, r"(?!--)"), words[0]):
            yield name, None
        else:
            yield name, words.pop(0)


def _parse(name: str, value: str | None) -> Any:
    if value is None:
        near = difflib.get_close_matches(name, ("resume", "overwrite", "help"), n=1)
        hint = f"did you mean --{near[0]}?" if near else f"write --{name} VALUE"
        raise RLHFError(f"--{name} has no value: {hint}")
    try:
        return yaml.safe_load(value)
    except yaml.YAMLError as error:
        if value[0] not in "[{\"'":  # A pattern such as `*.bias` is no alias here.
            return value
        problem = getattr(error, "problem", None) or "bad YAML"
        raise RLHFError(
            f"--{name} {value}: the value does not parse as YAML ({problem})"
        ) from error


def _source(word: str) -> Path:
    if not word.endswith((".yaml", ".yml")):
        raise RLHFError(f"'{word}' is no YAML file: data is given as --data, a model as --model")
    return Path(word)
