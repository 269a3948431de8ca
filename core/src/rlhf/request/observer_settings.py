"""The observers of a configuration, which may be a list of names or sections by name."""

import functools
import re
from collections.abc import Iterable, Mapping
from typing import Any

import attrs
from attrs import field

from rlhf.config.sections import Observers


def as_sections(layers: Iterable[Mapping[str, Any]]) -> tuple[list[str], list[Mapping[str, Any]]]:
    """Return the names of the observers, and the layers of a configuration with a section for each
    of them instead of a list of names.

    A list replaces the names of the layers before it and keeps the settings that they have for its
    names; a mapping adds to them.
    """
    names: list[str] = []
    named = []
    for layer in layers:
        value = layer.get("observers", {})
        if not isinstance(value, Mapping):
            names = []
            value = [] if value is None else value if isinstance(value, list | tuple) else [value]
            value = dict.fromkeys(map(str, value))
        names += [name for name in map(str, value) if name not in names]
        named.append({**layer, "observers": value} if "observers" in layer else layer)
    return names, named


@functools.cache
def observers_class(sections: tuple[tuple[str, type], ...]) -> type[Observers]:
    """Return Observers with the sections of these observers."""
    if not sections:
        return Observers
    fields = {
        re.sub(r"\W", "_", name): field(type=cls, factory=cls, metadata={"setting": name})
        for name, cls in sections
    }
    body = {"__doc__": Observers.__doc__}
    return attrs.make_class(
        "RunObservers", fields, bases=(Observers,), class_body=body, frozen=True, kw_only=True
    )
