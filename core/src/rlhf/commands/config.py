"""`rlhf config`: a configuration as YAML, with the documentation of its fields."""

import textwrap
from collections.abc import Iterator, Sequence
from typing import Any, Literal, get_args, get_origin

import attrs

from rlhf.config.field_docs import field_docs
from rlhf.config.sections import OptimConfig, OptimizerKind
from rlhf.config.structure import expected, section_class, setting_name
from rlhf.request.reader import Request
from rlhf.request.settings_tree import flow, to_tree


def config_command(request: Request) -> int:
    """Print the configuration; returns 0."""
    print(describe(request), end="")
    return 0


def describe(request: Request) -> str:
    """Return YAML with the value of every setting; it reads back to the same configuration."""
    config = request.config
    head = [f"The configuration of `rlhf run {request.name}`.", *request.notes]
    lines = _lines(type(config), to_tree(config), config.optimizers)
    return "\n".join([*_comment(" ".join(head)), *lines, ""])


def _lines(
    cls: type,
    tree: dict[str, Any],
    optimizers: Sequence[OptimizerKind],
    gap: tuple[str, ...] = ("",),
) -> Iterator[str]:
    """Yield the lines of a section; the fields of one that is off are comments."""
    for item in attrs.fields(cls):
        name = setting_name(item)
        section, value = section_class(item.type), tree[name]
        yield from gap
        if section is None:
            doc = _doc(cls, item)
            if item == attrs.fields(OptimConfig).name:
                doc = " ".join([doc, *(f"{kind.name}: {kind.about}" for kind in optimizers)])
            yield from _comment(doc)
            yield flow({name: value})
            continue
        yield from _comment(" ".join((section.__doc__ or "").split()))
        yield f"{name}:{' null' if value is None else '' if value else ' {}'}"
        inner = to_tree(section()) if value is None else value
        for line in _lines(section, inner, optimizers, ()):
            off = value is None and not line.startswith("#")
            yield f"  # {line}" if off else f"  {line}"


def _doc(cls: type, item: attrs.Attribute) -> str:
    doc = field_docs(cls).get(item.name, "")
    if entries := next(filter(attrs.has, get_args(item.type)), None):
        doc += f" An entry has {', '.join(map(setting_name, attrs.fields(entries)))}."
    choices = [kind for kind in (item.type, *get_args(item.type)) if get_origin(kind) is Literal]
    return f"{doc} ({expected(item.type)})" if choices else doc


def _comment(text: str) -> list[str]:
    return [f"# {line}" for line in textwrap.wrap(text, 96)]
