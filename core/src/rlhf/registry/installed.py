"""Stage 0 of a plugin: what the metadata of installed distributions say; nothing is imported."""

import functools
import keyword
import re
import sys
from collections.abc import Collection, Iterator, Mapping
from importlib import metadata
from pathlib import Path

import attrs
from attrs import field, frozen

from rlhf.config.sections import Config
from rlhf.errors import RLHFError, nearest

GROUPS = {
    "rlhf.trainers": "trainer",
    "rlhf.backends": "backend",
    "rlhf.observers": "observer",
    "rlhf.extensions": "extension",
    "rlhf.commands": "command",
    "rlhf.demos": "demo",
    "rlhf.exports": "export",
    "rlhf.formats": "format",
    "rlhf.kernels": "kernels",
    "rlhf.media": "media",
    "rlhf.rollouts": "rollouts",
}
WITH_SECTION = ("trainer", "backend")
"""Kinds of plugins whose name is also a configuration section."""
CORE_COMMANDS = {
    "run": "rlhf.commands.records:run",
    "config": "rlhf.commands.records:config",
    "export": "rlhf.commands.records:export",
    "merge": "rlhf.commands.merge:plugin",
}
"""The records of core's own commands, in the order of `rlhf --help`."""
SECTIONS = frozenset(item.name for item in attrs.fields(Config)) | {"nproc", "resume", "overwrite"}
"""Core's sections and the flags of `rlhf run`."""
RESERVED: Mapping[str, Collection[str]] = {
    **dict.fromkeys(WITH_SECTION, SECTIONS), "command": CORE_COMMANDS,
}  # fmt: skip
"""The names that no other distribution may use, by kind of plugin."""


class NotInstalled(RLHFError):
    """A plugin, or a distribution that it needs, is not installed; the message says how to."""


@frozen(kw_only=True)
class Installed:
    """A plugin as the metadata of its distribution describe it."""

    name: str
    kind: str
    distribution: str
    version: str
    summary: str
    problem: str | None = None
    """Why it cannot be used, as far as the metadata tell."""
    value: str = field(repr=False)
    """What the entry point names: a record."""

    def __str__(self) -> str:
        return f"{self.kind} '{self.name}' of {self.distribution} {self.version}".rstrip()


def installed() -> tuple[Installed, ...]:
    """Return all plugins, sorted by kind and name."""
    return tuple(
        attrs.evolve(row, problem=row.problem or _ambiguity(_named(row.kind, row.name)))
        for row in _scan(tuple(sys.path))
    )


def find(kind: str, name: str) -> Installed:
    """Return the plugin called `name`."""
    rows = _named(kind, name)
    if not rows:
        raise NotInstalled(_not_installed(kind, name))
    if problem := _ambiguity(rows) or rows[0].problem:
        raise RLHFError(f"{kind} '{name}' cannot be used: {problem}")
    return rows[0]


def find_command(name: str) -> Installed:
    """Return the command called `name`, of core or of another distribution."""
    if name not in CORE_COMMANDS:
        return find("command", name)
    return Installed(
        name=name, kind="command", distribution="rlhf-core", version="", summary="",
        value=CORE_COMMANDS[name],
    )  # fmt: skip


def find_backend(name: str | None) -> Installed:
    """Return the backend called `name`, or the only one installed if `name` is None."""
    if name is not None:
        return find("backend", name)
    names = sorted({row.name for row in installed() if row.kind == "backend"})
    if len(names) > 1:
        raise RLHFError(
            f"several backends are installed ({', '.join(names)}); choose one with --backend NAME"
        )
    if not names:
        package = known_plugins("backend")["deepspeed"]
        raise NotInstalled(f"no backend is installed; run `pip install {package}`")
    return find("backend", names[0])


def find_kernels() -> Installed | None:
    """Return the only kernels that are installed; None if there are none."""
    rows = [row for row in installed() if row.kind == "kernels"]
    if len(rows) > 1:
        names = " and ".join(f"{row.name} of {row.distribution}" for row in rows)
        raise RLHFError(f"several kernels are installed ({names}); uninstall all but one")
    return find("kernels", rows[0].name) if rows else None


def is_satisfied(requirement: str, *, extra: str = "") -> bool:
    """Return whether an installed distribution satisfies a requirement such as `peft>=0.18`; one of
    an extra counts only if it is `extra`."""
    from packaging.requirements import Requirement  # late: start-up time

    parsed = Requirement(requirement)
    if parsed.marker is not None and not parsed.marker.evaluate({"extra": extra}):
        return True
    try:
        version = metadata.version(parsed.name)
    except metadata.PackageNotFoundError:
        return False
    return parsed.specifier.contains(version, prereleases=True)


@functools.cache
def _scan(path: tuple[str, ...]) -> tuple[Installed, ...]:
    """Return every entry point in our groups. `path` is sys.path, the key of the cache.

    A distribution may be on the path twice, as editable installs are. As for `import`, the first
    one counts.
    """
    distributions: dict[str, tuple[Installed, ...]] = {}
    for distribution in metadata.distributions():
        # Parsing the metadata of every distribution would take longer than everything else.
        if "[rlhf." not in (distribution.read_text("entry_points.txt") or ""):
            continue
        if "Name" in distribution.metadata:  # An incomplete uninstall leaves a folder without.
            name = distribution.metadata["Name"]
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
                # Without one, `[]` of importlib_metadata raises.
                summary=distribution.metadata.get_all("Summary", [""])[0],
                problem=name_problem(kind, entry.name) or _version_problem(distribution),
                value=entry.value.partition("[")[0].strip(),
            )


def name_problem(kind: str, name: str) -> str | None:
    """Return why a plugin of this kind cannot have the name, if it cannot."""
    if kind in WITH_SECTION and (not name.isidentifier() or keyword.iskeyword(name)):
        problem = "a keyword of Python" if keyword.iskeyword(name) else "not a Python identifier"
        return f"its name '{name}' is {problem}, so it cannot be a section"
    if name in RESERVED.get(kind, ()):
        return f"its name '{name}' is reserved for core"
    return None


def _version_problem(distribution: metadata.Distribution) -> str | None:
    """Return a message if the installed rlhf-core is outside of the range that is required."""
    for line in distribution.requires or ():
        name = re.split(r"[^\w.-]", line)[0]
        if _canonical(name) == "rlhf-core" and not is_satisfied(line):
            return f"it needs {line}, but rlhf-core {metadata.version('rlhf-core')} is installed"
    return None


def _named(kind: str, name: str) -> list[Installed]:
    return [row for row in _scan(tuple(sys.path)) if (row.kind, row.name) == (kind, name)]


def _ambiguity(rows: list[Installed]) -> str | None:
    if len(rows) < 2:
        return None
    owners = " and ".join(f"{row.distribution} {row.version}" for row in rows)
    return f"{owners} both provide it; uninstall one"


def _not_installed(kind: str, name: str) -> str:
    """Suggest an installation only for our own plugins: a typo must not install a stranger's."""
    rows = [row for row in installed() if row.kind == kind]
    here = {each: each for each in CORE_COMMANDS if kind == "command"}
    here |= {row.name: f"{row.name} ({row.distribution} {row.version})" for row in rows}
    known = known_plugins(kind)
    hints = []
    if near := nearest(name, {**here, **known}):
        if near != name:
            hints.append(f"did you mean '{near}'?")
        if near not in here:
            hints.append(f"run `pip install {known.get(near)}`")
    hint = f" ({' '.join(hints)})" if hints else ""
    available = ", ".join(here.values()) or "none"
    return f"{kind} '{name}' is not installed{hint}; available: {available}"


def known_plugins(kind: str) -> dict[str, str]:
    """Return names and distributions of our own plugins, from a list generated out of plugins/."""
    lines = Path(__file__).with_name("known_plugins.txt").read_text(encoding="utf-8").splitlines()
    return {name: package for of, name, package in map(str.split, lines) if of == kind}


def _canonical(distribution: str) -> str:
    return re.sub(r"[-_.]+", "-", distribution).lower()
