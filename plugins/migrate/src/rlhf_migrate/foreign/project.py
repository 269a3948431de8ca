"""What the table of another project consists of."""

from collections.abc import Mapping
from typing import Any, Literal

from attrs import field, frozen

EMPTY: tuple[Any, ...] = (None, "", [], {})
"""Values with which any key has no effect."""
OFF = (*EMPTY, False, "none", "no", 0, ())
"""Values with which a key usually has no effect."""


@frozen(kw_only=True)
class Rule:
    """What a key of another project is here."""

    ours: str = ""
    """Our setting, or what the key is here in words."""
    kind: Literal["set", "factor", "read", "unneeded", "lost"] = "set"
    """set: our setting takes the value. factor: the value is a factor of `batch.size`. read: it is
    translated together with others. unneeded: it changes nothing that is learned. lost: it does,
    and has no counterpart."""
    values: Mapping[Any, Any] | None = None
    """Our value by theirs, or several settings by theirs; any other value is lost."""
    note: str = ""
    """What differs; with `values`, what happens to any other value."""
    off: tuple[Any, ...] = EMPTY
    """Values with which the key has no effect."""


@frozen(kw_only=True)
class Variant:
    """A trainer of another project."""

    trainer: str
    """The trainer here."""
    keys: Mapping[str, Rule] = field(factory=dict)
    """Keys of this trainer only."""
    defaults: Mapping[str, Any] = field(factory=dict)
    """Defaults of this trainer that change what is learned, in addition to the project's."""
    settings: Mapping[str, Any] = field(factory=dict)
    """Our settings that make our trainer this one."""


@frozen(kw_only=True)
class Project:
    """Another project: its keys, and its defaults that change what is learned."""

    title: str
    version: str
    """The version whose sources the tables were read from."""
    command: str
    """A pattern of its command line; a group is the trainer's name."""
    keys: Mapping[str, Rule]
    """Keys of all its trainers. A later rule for the same setting has precedence."""
    defaults: Mapping[str, Any]
    variants: Mapping[str, Variant]
    chosen_by: tuple[str, ...] = ()
    """Keys whose value names the trainer, or that name it if they are true."""
    usual: str | None = None
    """The trainer, if none of them is set."""
    data_set: Mapping[str, Rule] = field(factory=dict)
    """Keys of a data set in its list of data sets, or in its file that describes them."""
    empty_is_default: bool = False
    """A key without a value has its default there. Otherwise it is switched off."""


def to(
    ours: str,
    values: Mapping[Any, Any] | None = None,
    *,
    note: str = "",
    off: tuple[Any, ...] = EMPTY,
) -> Rule:
    """Return the rule of a key whose value our setting takes."""
    return Rule(ours=ours, values=values, note=note, off=off)


def factor(ours: str) -> Rule:
    """Return the rule of a factor of `batch.size`."""
    return Rule(ours=ours, kind="factor")


def read(names: str, ours: str = "", note: str = "") -> dict[str, Rule]:
    """Return rules of keys that are translated together with others."""
    return dict.fromkeys(names.split(), Rule(ours=ours, kind="read", note=note, off=OFF))


def unneeded(names: str, ours: str = "") -> dict[str, Rule]:
    """Return rules of keys that change nothing that is learned."""
    return dict.fromkeys(names.split(), Rule(ours=ours, kind="unneeded"))


def lost(names: str, note: str = "") -> dict[str, Rule]:
    """Return rules of keys without a counterpart."""
    return dict.fromkeys(names.split(), Rule(kind="lost", note=note, off=OFF))
