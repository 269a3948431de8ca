"""Plugins are found by entry point and loaded in three stages: metadata, record, import string."""

import difflib
import functools
import importlib
import re
import sys
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

import attrs
from attrs import field, frozen

from rlhf.config.sections import Config
from rlhf.errors import RLHFError, first_line
from rlhf.plugin import BackendPlugin, TrainerPlugin

GROUPS = {
    "rlhf.trainers": "trainer",
    "rlhf.backends": "backend",
    "rlhf.observers": "observer",
    "rlhf.extensions": "extension",
}
RECORDS: dict[str, Any] = {"trainer": TrainerPlugin, "backend": BackendPlugin}
RESERVED = frozenset(item.name for item in attrs.fields(Config)) | {"nproc", "resume", "overwrite"}
"""Core's sections and the flags of `rlhf run`: no trainer or backend can be called so."""


@frozen(kw_only=True)
class Installed:
    """A plugin as the metadata of its distribution tells it; nothing of it is imported."""

    name: str
    kind: str
    distribution: str
    version: str
    summary: str
    problem: str | None = None
    """Why it cannot be used, as far as metadata tells."""
    value: str = field(repr=False)
    """What the entry point names: a record, or the class of an observer or extension."""

    def __str__(self) -> str:
        return f"{self.kind} '{self.name}' of {self.distribution} {self.version}"


def installed() -> tuple[Installed, ...]:
    """Every plugin by kind and name, with its problem if it has one."""
    return tuple(
        attrs.evolve(row, problem=row.problem or _rivalry(_named(row.kind, row.name)))
        for row in _scan(tuple(sys.path))
    )


def find(kind: str, name: str) -> Installed:
    """The plugin called `name`, or `name@distribution` where two distributions give that name."""
    plain, chosen, wanted = name.partition("@")
    rows = _named(kind, plain)
    if chosen:
        rows = [row for row in rows if _canonical(row.distribution) == _canonical(wanted)]
    if not rows:
        raise RLHFError(_not_installed(kind, name))
    problem = _rivalry(rows) or rows[0].problem
    if problem is not None:
        raise RLHFError(f"{kind} '{plain}' cannot be used: {problem}")
    return rows[0]


def find_backend(name: str | None) -> Installed:
    """The backend called `name`; without a name the only one installed."""
    if name is not None:
        return find("backend", name)
    names = sorted({row.name for row in installed() if row.kind == "backend"})
    if len(names) > 1:
        raise RLHFError(
            f"several backends are installed ({', '.join(names)}): choose with --backend NAME"
        )
    if not names:
        package = _known("backend")["deepspeed"]
        raise RLHFError(f"no backend is installed: `pip install {package}` adds one")
    return find("backend", names[0])


def load_record(plugin: Installed) -> Any:
    """Stage 1: the TrainerPlugin or BackendPlugin that the entry point names."""
    record = load_object(plugin.value, plugin)
    expected = RECORDS[plugin.kind]
    if not isinstance(record, expected):
        kind = type(record).__name__
        raise RLHFError(
            f"{plugin}: {plugin.value} is a {kind}, not a rlhf.plugin.{expected.__name__}"
        )
    if not attrs.has(record.config):
        raise RLHFError(f"{plugin}: its config {record.config!r} is no attrs class")
    for requirement in getattr(record, "requires", ()):
        if not _satisfied(requirement):
            raise RLHFError(f"{plugin} needs {requirement}: `pip install '{requirement}'` adds it")
    return record


def demo_file(plugin: Installed, record: TrainerPlugin) -> Path:
    """The YAML of the trainer's demo, beside the module of its record."""
    if record.demo is None:
        raise RLHFError(f"{plugin} has no demo: give --model and --data")
    return Path(str(sys.modules[plugin.value.partition(":")[0]].__file__)).with_name(record.demo)


def load_object(path: str, plugin: Installed | None = None) -> Any:
    """Stage 2: what the import string `module:name` names; `plugin` is who said so."""
    module, _, name = path.partition(":")
    try:
        return functools.reduce(getattr, name.split("."), importlib.import_module(module))
    except RLHFError:
        raise
    except Exception as error:  # A stranger's module may raise anything.
        said = f"{type(error).__name__}: {first_line(error)}"
        advice = f"`python -c 'import {module}'` shows where"
        raise RLHFError(f"{plugin or path} does not import: {said} ({advice})") from error


def load_own(path: str) -> Any:
    """What a user's own import string `module:name` names; the module may stand in the current
    folder, which the command `rlhf` does not have on its path. It comes last there, so that no file
    of the user's stands in for a module of ours."""
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.append(here)
    return load_object(path)


@functools.cache
def _scan(path: tuple[str, ...]) -> tuple[Installed, ...]:
    """Every entry point in our groups. `path` is sys.path: the key of the cache.

    A distribution that is found twice, as with editable installs, is the first, as for `import`.
    """
    distributions: dict[str, tuple[Installed, ...]] = {}
    for distribution in metadata.distributions():
        # Parsing the metadata of every distribution would cost more than all the rest.
        if "[rlhf." not in (distribution.read_text("entry_points.txt") or ""):
            continue
        name = distribution.metadata["Name"]
        if name is not None:  # Without a name it is what an uninstall has left behind.
            distributions.setdefault(_canonical(name), tuple(_rows(name, distribution)))
    rows = (row for group in distributions.values() for row in group)
    return tuple(sorted(rows, key=lambda row: (row.kind, row.name, row.distribution)))


def _rows(name: str, distribution: metadata.Distribution) -> Iterator[Installed]:
    for entry in distribution.entry_points:
        if entry.group in GROUPS:
            kind = GROUPS[entry.group]
            yield Installed(
                name=entry.name,
                kind=kind,
                distribution=name,
                version=distribution.version,
                summary=distribution.metadata["Summary"] or "",
                problem=_name_problem(kind, entry.name) or _version_problem(distribution),
                value=entry.value.partition("[")[0].strip(),
            )


def _name_problem(kind: str, name: str) -> str | None:
    if kind in RECORDS and not name.isidentifier():
        return f"its name '{name}' is no Python identifier, so it cannot be a section"
    if kind in RECORDS and name in RESERVED:
        return f"its name '{name}' is reserved for core"
    return None


def _version_problem(distribution: metadata.Distribution) -> str | None:
    """The range of rlhf-core that the distribution asks for, where the installed one is outside."""
    for line in distribution.requires or ():
        name = re.split(r"[^\w.-]", line)[0]
        if _canonical(name) == "rlhf-core" and not _satisfied(line):
            return f"it needs {line}, and rlhf-core {metadata.version('rlhf-core')} is installed"
    return None


def _satisfied(line: str) -> bool:
    from packaging.requirements import Requirement  # late: start-up time

    requirement = Requirement(line)
    if requirement.marker is not None and not requirement.marker.evaluate({"extra": ""}):
        return True
    try:
        version = metadata.version(requirement.name)
    except metadata.PackageNotFoundError:
        return False
    return requirement.specifier.contains(version, prereleases=True)


def _named(kind: str, name: str) -> list[Installed]:
    return [row for row in _scan(tuple(sys.path)) if (row.kind, row.name) == (kind, name)]


def _rivalry(rows: list[Installed]) -> str | None:
    if len(rows) < 2:
        return None
    owners = " and ".join(f"{row.distribution} {row.version}" for row in rows)
    choice = f"{rows[0].name}@{rows[0].distribution}"
    return f"{owners} both give that name: say which, as in {choice}, or uninstall one"


def _not_installed(kind: str, name: str) -> str:
    """Only our own plugins are proposed for installation: a typo must not install a stranger's."""
    rows = [row for row in installed() if row.kind == kind]
    here = {row.name: f"{row.name} ({row.distribution} {row.version})" for row in rows}
    known = _known(kind)
    hints = []
    for near in difflib.get_close_matches(name.partition("@")[0], {**here, **known}, n=1):
        hints += [f"did you mean '{near}'?"] * (near != name)
        hints += [f"`pip install {known.get(near)}` adds it"] * (near not in here)
    hint = f" ({' '.join(hints)})" if hints else ""
    return f"no {kind} '{name}' is installed{hint}; installed: {', '.join(here.values()) or 'none'}"


def _known(kind: str) -> dict[str, str]:
    """Names and distributions of our own plugins, from a list generated out of plugins/."""
    lines = Path(__file__).with_name("known_plugins.txt").read_text().splitlines()
    return {name: package for of, name, package in map(str.split, lines) if of == kind}


def _canonical(distribution: str) -> str:
    return re.sub(r"[-_.]+", "-", distribution).lower()
