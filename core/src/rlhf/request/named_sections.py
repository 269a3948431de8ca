"""The extensions and the observers of a configuration: a list of names, or sections by name."""

import functools
import re
from collections.abc import Iterable, Mapping
from typing import Any

import attrs
from attrs import field

from rlhf.config.sections import NamedSections

Sections = tuple[tuple[str, type], ...]
"""Names of plugins, each with the class of its settings."""


def as_sections(
    key: str, layers: Iterable[Mapping[str, Any]]
) -> tuple[list[str], list[Mapping[str, Any]]]:
    """Return the names in the setting `key`, and the layers of a configuration with a section for
    each of them instead of a list of names.

    A list replaces the names of the layers before it and keeps the settings that they have for its
    names; a mapping adds to them.
    """
    names: list[str] = []
    named = []
    for layer in layers:
        value = layer.get(key, {})
        if not isinstance(value, Mapping):
            names = []
            value = [] if value is None else value if isinstance(value, list | tuple) else [value]
            value = dict.fromkeys(map(str, value))
        names += [name for name in map(str, value) if name not in names]
        named.append({**layer, key: value} if key in layer else layer)
    return names, named


@functools.cache
def sections_class(base: type[NamedSections], sections: Sections) -> type[NamedSections]:
    """Return `base` with these sections. Its instances can be pickled."""
    fields = {
        re.sub(r"\W", "_", name): field(type=cls, factory=cls, metadata={"setting": name})
        for name, cls in sections
    }
    body = {
        "__doc__": base.__doc__,
        "__reduce__": lambda self: (_rebuild, (base, sections, attrs.asdict(self, recurse=False))),
    }
    return attrs.make_class(
        f"Run{base.__name__}", fields, bases=(base,), class_body=body, frozen=True, kw_only=True
    )


def _rebuild(base: Any, sections: Sections, values: Mapping[str, Any]) -> NamedSections:
    return sections_class(base, sections)(**values)
