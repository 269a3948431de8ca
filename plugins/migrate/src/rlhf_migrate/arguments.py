"""A file of another project becomes the keys that it sets, with the project and the trainer."""

import itertools
import re
import shlex
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from attrs import frozen

from rlhf.cli import load_yaml, parse_yaml
from rlhf.errors import RLHFError
from rlhf_migrate.foreign import PROJECTS

DEVICES = re.compile(r"--(?:num_processes|nproc[-_]per[-_]node|num_gpus)[ =](\d+)")
"""Options of launchers that say how many devices there are."""
ASSIGNMENT = re.compile(r"^\s*(?:export\s+)?(\w+)=(\S+|\"[^\"]*\"|'[^']*')\s*$", re.MULTILINE)
VARIABLE = re.compile(r"\$(?:(\w+)|\{(\w+)(?::?[-=]([^}]*))?\})")
"""`$NAME`, `${NAME}`, or `${NAME:-default}`."""

SHELL = re.compile(
    r"""'[^']*'|"(?:\\.|[^"\\])*"|\\."""
    r"|(?P<redirection>(?:(?<=\s)\d+|&)?[<>]+&?\s*[^\s&|;<>]*)|(?P<end>[&|;])|.",
    re.DOTALL,
)
"""Quoted text, a redirection, the end of a command, or another character of a shell script."""


@frozen(kw_only=True)
class Arguments:
    """What a file of another project sets."""

    project: str
    """Its name in `PROJECTS`."""
    variant: str
    """The name of its trainer there."""
    keys: Mapping[str, Any]
    devices: int | None = None
    """How many devices the command line asks for."""


def read_arguments(path: Path, chosen: str | None = None) -> Arguments:
    """Return what a YAML file, a JSON file or a shell script sets. `chosen` is the project, or
    project/trainer, if the user names it. Raises RLHFError if it cannot be found out."""
    project, _, variant = (chosen or "").partition("/")
    if project and project not in PROJECTS:
        raise RLHFError(f"--from {project} is not known; available: {', '.join(PROJECTS)}")
    if path.suffix == ".py":
        raise RLHFError(f"{path} is a Python script; write its arguments into a YAML file")
    if path.suffix in (".yaml", ".yml", ".json"):
        keys, named, devices = load_yaml(path), ("", ""), None
    else:
        named, keys, devices = _command(path)
    project = project or named[0] or _most_known(keys, path)
    variant = variant or named[1] or _variant(project, keys, path)
    variants = PROJECTS[project].variants
    if variant not in variants:
        title, known = PROJECTS[project].title, ", ".join(variants)
        raise RLHFError(f"{title}'s {variant} has no counterpart here; those of {known} have one")
    return Arguments(project=project, variant=variant, keys=keys, devices=devices)


def _command(path: Path) -> tuple[tuple[str, str], dict[str, Any], int | None]:
    """Return project and trainer, the keys, and the devices of the training that a shell script
    starts."""
    try:
        text = path.read_text(encoding="utf-8").replace("\\\n", " ")
    except (OSError, UnicodeDecodeError) as error:
        raise RLHFError(f"cannot read {path}: {error}") from error
    text = _expanded(text)
    found = [
        (name, next(filter(None, match.groups()), ""), line, line[match.end() :])
        for line in text.splitlines()
        for name, project in PROJECTS.items()
        if (match := re.search(project.command, line.partition("#")[0]))
    ]
    if len(found) != 1:
        problem = f"starts {len(found)} trainings" if found else "starts no training that is known"
        titles = ", ".join(project.title for project in PROJECTS.values())
        raise RLHFError(f"{path} {problem}; it must have one command line of {titles}")
    name, variant, line, after = found[0]
    try:
        words = shlex.split(_one_command(after).replace("$'", "'"), comments=True)
    except ValueError as error:
        raise RLHFError(f"{path}: the command line cannot be parsed ({error})") from error
    devices = DEVICES.search(line)
    return (name, variant), _options(words, path), int(devices[1]) if devices else None


def _expanded(text: str) -> str:
    """Return a script with the values of its variables; one without a value stays."""
    variables: dict[str, str] = {}

    def expand(part: str) -> str:
        return VARIABLE.sub(
            lambda match: variables.get(match[1] or match[2], match[3] or match[0]), part
        )

    for name, value in ASSIGNMENT.findall(text):
        variables[name] = expand(value.strip("\"'"))
    return expand(text)


def _one_command(text: str) -> str:
    """Return the text up to the end of its first command, without redirections."""
    pieces = itertools.takewhile(lambda piece: not piece["end"], SHELL.finditer(text))
    return "".join(piece[0] for piece in pieces if not piece["redirection"])


def _options(words: Sequence[str], path: Path) -> dict[str, Any]:
    """Return the options in the words; a YAML file among them, or after `--config`, comes first."""
    options: dict[str, list[str]] = {}
    name, file = "", {}
    for word in words:
        if word in ("$@", "$*"):
            continue
        if re.fullmatch(r"--[a-zA-Z][\w.-]*(=.*)?", word, re.DOTALL):
            name, equals, value = word[2:].partition("=")
            name = name.replace("-", "_")
            options[name] = [value] if equals else []
        elif name:
            options[name].append(word)
        elif re.fullmatch(r"\w+=.*", word):  # As Hydra and LLaMA-Factory write them.
            key, _, value = word.partition("=")
            options[key] = [value]
        elif word.endswith((".yaml", ".yml")):
            file = load_yaml(located(word, path.parent))
    if "config" in options:
        file = load_yaml(located(options.pop("config")[0], path.parent))
    flags = {name: _value(values) for name, values in options.items()}
    negated = [name for name in flags if name.startswith("no_") and flags[name] is True]
    for name in negated:
        flags[name.removeprefix("no_")] = not flags.pop(name)
    return file | flags


def located(name: str, folder: Path) -> Path:
    """Return a path that a file in `folder` names, relative to the working directory or to it."""
    return Path(name) if Path(name).exists() else folder / name


def _value(values: list[str]) -> Any:
    """Return the value of an option: true without words, else one or several."""
    parsed = [parse(text) for text in values]
    return True if not parsed else parsed[0] if len(parsed) == 1 else parsed


def parse(text: str) -> Any:
    """Return the value that a text has in YAML; the text itself if it is not YAML."""
    try:
        value = parse_yaml(text)
    except yaml.YAMLError:
        return text
    return text if isinstance(value, dict) and not text.startswith("{") else value


def _most_known(keys: Mapping[str, Any], path: Path) -> str:
    """Return the project that knows the most of the keys."""
    known = {
        name: set(project.keys).union(*(variant.keys for variant in project.variants.values()))
        for name, project in PROJECTS.items()
    }
    best = _best(known, keys)
    if len(best) > 1:
        raise RLHFError(
            f"{path} could be of {' or '.join(best)}; pass --from {best[0]} or another one"
        )
    return best[0]


def _variant(name: str, keys: Mapping[str, Any], path: Path) -> str:
    """Return the trainer that the keys name, or whose own keys are the most of them."""
    project = PROJECTS[name]
    for key in project.chosen_by:
        if value := keys.get(key):
            return key if value is True else str(value)
    if project.usual:
        return project.usual
    best = _best({each: variant.keys for each, variant in project.variants.items()}, keys)
    if len(best) > 1:
        raise RLHFError(
            f"{path} does not say which trainer of {project.title} it is for; pass "
            + " or ".join(f"--from {name}/{each}" for each in best)
        )
    return best[0]


def _best(known: Mapping[str, Collection[str]], keys: Mapping[str, Any]) -> list[str]:
    """Return the names that know the most of the keys."""
    counts = {name: len(keys.keys() & {*theirs}) for name, theirs in known.items()}
    return [name for name, count in counts.items() if count == max(counts.values())]
