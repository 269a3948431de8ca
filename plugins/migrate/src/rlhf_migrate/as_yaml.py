"""A migration as YAML with comments: where each setting comes from, and what is not the same."""

import textwrap
from collections.abc import Iterator
from typing import Any

import attrs

from rlhf.cli import flow, section_class, setting_name
from rlhf.plugin import Config
from rlhf_migrate.rules import Migration

ORDER = ("model", "data", "batch", "optim", "train", "checkpoint", "lora", "deepspeed")


def page(migration: Migration, source: str) -> str:
    """Return the YAML file, which `rlhf run` reads."""
    lines = [f"# {migration.title}, from {source}, for `rlhf run {migration.trainer}`."]
    lines += remarks(migration)
    return "\n".join([*lines, "", *_sections(migration), ""])


def remarks(migration: Migration) -> Iterator[str]:
    """Yield comments on what is not the same."""
    lost = {key: note or "has no counterpart" for key, note in migration.lost.items()}
    for title, entries in (
        ("To be completed:", migration.incomplete),
        ("Changes what is learned, and is left out:", lost),
        ("Is not the same:", migration.notes),
    ):
        if entries:
            yield from ("#", f"# {title}")
            for key, note in entries.items():
                yield from _wrapped(f"{key}: {note}", "# - ")
    for title, keys in (
        ("Not needed here", migration.unneeded),
        ("Not known to `rlhf migrate`", migration.unknown),
    ):
        if keys:
            yield "#"
            yield from _wrapped(f"{title}: {', '.join(dict.fromkeys(keys))}", "# ")


def _wrapped(text: str, first: str) -> list[str]:
    return textwrap.wrap(
        text, 98, initial_indent=first, subsequent_indent="#".ljust(len(first)),
        break_long_words=False, break_on_hyphens=False,
    )  # fmt: skip


def _sections(migration: Migration) -> Iterator[str]:
    """Yield the settings, section by section, each with the key that it comes from."""
    sections: dict[str, list[tuple[str, Any, str]]] = {name: [] for name in ORDER}
    for name, value in migration.settings.items():
        section, _, field = name.rpartition(".")
        sections.setdefault(section, []).append((field, value, migration.origins[name]))
    for section, entries in sections.items():
        entries.sort(key=lambda entry: _place(section, entry[0]))
        if entries and section:
            yield f"{section}:"
        indent = "  " if section else ""
        texts = [f"{indent}{flow({name: value})}" for name, value, _ in entries]
        width = max((len(text) for text in texts if len(text) <= 50), default=0)
        for text, (name, value, origin) in zip(texts, entries, strict=True):
            if len(text) <= 70 or not isinstance(value, list):
                yield f"{text:<{width}}  # {origin}"
                continue
            yield f"{indent}{name}:  # {origin}"
            yield from (f"{indent}  - {flow([each])}" for each in value)


def _place(section: str, field: str) -> int:
    """Return the place of a field in its section of core."""
    kind = section_class(getattr(attrs.fields(Config), section, attrs.fields(Config).model).type)
    names = [setting_name(item) for item in attrs.fields(kind)] if kind else []
    return names.index(field) if field in names else len(names)
