"""Layers of a configuration: trees of plain data, read from YAML, merged and compared."""

import re
import sys
from collections.abc import Collection, Mapping
from itertools import chain
from pathlib import Path, PurePath
from typing import Any, get_args

import attrs
import yaml

from rlhf.config.sections import DataConfig, DataEntry
from rlhf.config.structure import as_mapping, section_class, setting_name
from rlhf.errors import RLHFError, first_line


def load_yaml(path: Path | None) -> dict[str, Any]:
    """Return the mapping in a YAML file; empty for None and for an empty file."""
    if path is None:
        return {}
    try:
        tree = parse_yaml(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise RLHFError(f"cannot read {path}: {error.strerror}") from error
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else 1
        raise RLHFError(f"{path} line {line}: {error.problem}") from error
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise RLHFError(f"{path} is not valid YAML: {first_line(error)}") from error
    if not isinstance(tree or {}, dict):
        expected = "expected sections such as `optim: {lr: 1e-5}`"
        raise RLHFError(f"{path} contains a {type(tree).__name__}; {expected}")
    return tree or {}


def load_demo(path: Path | None) -> dict[str, Any]:
    """Return the mapping in the demo's YAML file, with absolute paths of the data beside it."""
    tree = load_yaml(path)
    if path is None or "data" not in tree:
        return tree
    data = as_mapping(DataConfig, tree["data"])
    for key in (name for name in ("train", "eval") if data.get(name) is not None):
        entries = data[key] if isinstance(data[key], list) else [data[key]]
        data[key] = [_beside(path.parent, as_mapping(DataEntry, entry)) for entry in entries]
    return tree | {"data": data}


def load_recorded(path: Path) -> dict[str, Any]:
    """Return the tree in the config.yaml of a run folder without the observers, which need not be
    installed where the folder is read."""
    tree = load_yaml(path)
    tree.pop("observers", None)
    if isinstance(tree.get("extensions"), list):  # As rlhf wrote it before they had settings.
        tree["extensions"] = {name: {} for name in tree["extensions"]}
    return tree


def without_removed(kind: Any, tree: Any) -> Any:
    """Return a tree of type `kind` from the config.yaml of a run folder without the settings that
    its classes list as `removed_settings`.

    A run records every setting, also those that had no effect and have since been removed.
    """
    if isinstance(tree, list) and get_args(kind):
        return [without_removed(get_args(kind)[0], item) for item in tree]
    section = section_class(kind)
    if section is None or not isinstance(tree, Mapping):
        return tree
    fields = attrs.fields(attrs.resolve_types(section))
    kinds = {setting_name(item): item.type for item in fields}
    removed = getattr(section, "removed_settings", {})
    kept = {key: item for key, item in tree.items() if item not in removed.get(key, ())}
    return {key: without_removed(kinds.get(key), item) for key, item in kept.items()}


def without(tree: Mapping[str, Any], names: Collection[str], above: str = "") -> dict[str, Any]:
    """Return a tree without the settings and the sections of these dotted names. `above` is the
    dotted name of the tree itself, with a dot at its end."""
    return {
        key: without(item, names, f"{above}{key}.") if isinstance(item, Mapping) else item
        for key, item in tree.items()
        if f"{above}{key}" not in names
    }


def merge(cls: type, *layers: Mapping[str, Any]) -> dict[str, Any]:
    """Return the layers as one tree, each over the one before, section by section; null disables an
    optional section."""
    kinds = {setting_name(item): item.type for item in attrs.fields(cls)}
    merged: dict[str, Any] = {}
    for key, value in chain.from_iterable(layer.items() for layer in layers):
        section = section_class(kinds.get(key))
        if section is None or (value is None and section is not kinds[key]):
            merged[key] = value
        else:
            below = as_mapping(section, merged.get(key))
            merged[key] = merge(section, below, as_mapping(section, value))
    return merged


def nested(dotted: str, value: Any) -> dict[str, Any]:
    """Return the tree in which only the setting `dotted` has a value."""
    for key in reversed(dotted.split(".")):
        value = {key: value}
    return value


def to_tree(config: Any) -> Any:
    """Return the tree of a configuration; reading it gives an equal configuration."""
    if attrs.has(type(config)):
        fields = attrs.fields(type(config))
        return {setting_name(item): to_tree(getattr(config, item.name)) for item in fields}
    if isinstance(config, Mapping):
        return {key: to_tree(item) for key, item in config.items()}
    # YAML has no tuples.
    return [to_tree(item) for item in config] if isinstance(config, list | tuple) else config


def flow(value: Any) -> str:
    """Return a list or a mapping as YAML on one line, without its outer brackets."""
    return yaml.dump(
        value, Dumper=_Dumper, default_flow_style=True, sort_keys=False, width=sys.maxsize
    )[1:-2]


def changed_keys(old: Mapping[str, Any], new: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Return {dotted: (old, new)} of the leaves that differ, in lists of entries too; a missing
    leaf counts as None."""
    changes: dict[str, tuple[Any, Any]] = {}
    for key in {**old, **new}:
        before, after = old.get(key), new.get(key)
        inner_old, inner_new = _by_key(before), _by_key(after)
        if inner_old is not None and inner_new is not None:
            inner = changed_keys(inner_old, inner_new)
            changes |= {f"{key}.{name}": pair for name, pair in inner.items()}
        elif before != after:
            changes[key] = (before, after)
    return changes


def leaves(tree: Mapping[str, Any]) -> dict[str, Any]:
    """Return the leaves of a tree by dotted name; an empty mapping is a leaf."""
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        if isinstance(value, Mapping) and value:
            flat |= {f"{key}.{inner}": item for inner, item in leaves(value).items()}
        else:
            flat[key] = value
    return flat


def _by_key(value: Any) -> Mapping[str, Any] | None:
    """Return a mapping, or a list of mappings by number; None for another value."""
    if isinstance(value, list) and all(isinstance(item, Mapping) for item in value):
        return {str(number): item for number, item in enumerate(value)}
    return value if isinstance(value, Mapping) else None


def _beside(folder: Path, entry: dict[str, Any]) -> dict[str, Any]:
    """Return an entry of data with an absolute path if it exists in `folder`; names of the Hub and
    of embedded data do not."""
    place = folder / str(entry.get("path"))
    return entry | {"path": str(place)} if place.exists() else entry


class _Dumper(yaml.SafeDumper):
    """Writes paths as text."""


_Dumper.add_multi_representer(PurePath, lambda dumper, path: dumper.represent_str(str(path)))


MERGE = "tag:yaml.org,2002:merge"
TEXT = "tag:yaml.org,2002:str"
OCTAL_OR_CLOCK = re.compile(r"[-+]?(0[0-7_]+|.*:.*)")
"""Numbers that YAML 1.1 reads in base 8, such as 010, or in base 60, such as 12:30:45."""


def parse_yaml(text: str) -> Any:
    """Return the content of a YAML document. Raises yaml.YAMLError for any that cannot be read."""
    try:
        return yaml.load(text, Loader=_Loader)
    except RecursionError:
        raise yaml.YAMLError("it is nested too deeply") from None
    except (ArithmeticError, ValueError) as error:  # A character that does not exist, in quotes.
        raise yaml.YAMLError(str(error)) from None


class _Loader(yaml.SafeLoader):
    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        """Refuse duplicate keys, of which YAML would silently take the last, and read keys as they
        are written: `on` is not true."""
        node = super().compose_mapping_node(anchor)
        seen: set[str] = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode):
                if key.value in seen:
                    raise _error(key, f"duplicate key '{key.value}'")
                seen.add(key.value)
                key.tag = key.tag if key.tag == MERGE else TEXT
        return node

    def construct_document(self, node: yaml.Node) -> Any:
        """Refuse a list or a mapping that contains itself."""
        self.deep_construct = True
        return super().construct_document(node)

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        """Refuse a scalar that is not what its form or its tag says, such as 2026-13-01."""
        try:
            value = super().construct_object(node, deep)
        except (ArithmeticError, AttributeError, LookupError, ValueError):
            kind = node.tag.rpartition(":")[2]
            text = str(node.value)[:40]
            raise _error(node, f"{text} is not a valid {kind}; quote it if it is text") from None
        number = isinstance(value, int | float) and not isinstance(value, bool)
        if number and OCTAL_OR_CLOCK.fullmatch(node.value):
            problem = f"{node.value} is the number {value} in YAML; quote it, or write {value}"
            raise _error(node, problem)
        return value


def _error(node: yaml.Node, problem: str) -> yaml.MarkedYAMLError:
    return yaml.MarkedYAMLError(problem=problem, problem_mark=node.start_mark)
