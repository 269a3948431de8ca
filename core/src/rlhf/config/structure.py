"""A strict reader on cattrs: plain data become attrs classes, and each problem has a path."""

import functools
import json
import math
import pathlib
import types
from collections.abc import Callable, Iterable, Iterator, Mapping
from datetime import date
from typing import Any, Literal, Union, get_args, get_origin

import attrs
import cattrs

from rlhf.config.source_names import local_path
from rlhf.errors import nearest

Path = tuple[str, ...]
REMOVED = {"offload": "full", "reference": "rowwise"}
"""Values of earlier versions, and what replaces them (of `model.recompute`, `model.fp8`)."""


class ProblemsError(ValueError):
    """All problems of a tree as paths and texts; an empty text marks an unknown key."""

    def __init__(self, problems: list[tuple[Path, str]]) -> None:
        super().__init__(problems)
        self.problems = problems


def structure(tree: Mapping[str, Any], cls: type) -> tuple[Any, list[str]]:
    """Return the instance of `cls` in `tree` and no problems, or None and all problems."""
    try:
        return _converter.structure(tree, cls), []
    except ProblemsError as error:
        return None, [_message(path, text, cls) for path, text in error.problems]


def section_class(kind: Any) -> type | None:
    """Return the attrs class of a field that is a section, optional or not, else None."""
    return next((each for each in (kind, *_members(kind)) if attrs.has(each)), None)


def as_mapping(cls: type, value: Any) -> dict[str, Any]:
    """Return a section's tree: a bare value sets the first field, None sets none."""
    if isinstance(value, Mapping):
        return dict(value)
    return {} if value is None else {setting_name(attrs.fields(cls)[0]): value}


def setting_name(item: Any) -> str:
    """Return the name of the setting in a field: that in its metadata, or that of the field without
    the underscore that tells it from a word of Python's."""
    return str(item.metadata.get("setting", item.name.removesuffix("_")))


def expected(kind: Any) -> str:
    """Return what a value of this type is called."""
    if get_origin(kind) is Literal:
        choices = ", ".join(map(str, get_args(kind)))
        return f"one of {choices}" if len(get_args(kind)) > 1 else choices
    if _members(kind):
        return " or ".join(map(expected, _members(kind)))
    names = {bool: "true or false", int: "a whole number", float: "a number", str: "text"}
    names |= {tuple: "a list", types.NoneType: "null"}
    return names.get(get_origin(kind) or kind, "a mapping")


def _wrong(value: Any, kind: Any) -> ValueError:
    text = f"expected {expected(kind)}, got {_shown(value)}"
    if get_origin(kind) is Literal and (near := nearest(str(value), map(str, get_args(kind)))):
        text += f"; did you mean {near}?"
    if REMOVED.get(str(value)) in get_args(kind):
        text += f"; {value} was removed, use {REMOVED[str(value)]}"
    if str in (kind, *_members(kind)) and isinstance(value, int | float | date):
        # Others may be written in several ways.
        written = value if type(value) in (int, date) else "..."
        text += f"; quote it: '{written}' in YAML, \"'{written}'\" in a shell"
    return ValueError(text)


def _shown(value: Any) -> str:
    """Return what an error says that a value is: its text, or what YAML made of it."""
    if isinstance(value, date):
        return "a date"
    if isinstance(value, bytes):
        return "binary data"
    return "a set" if isinstance(value, set) else json.dumps(value, default=str)


def _read_exactly(value: Any, kind: Any) -> Any:
    """Convert nothing: by default cattrs turns "false" into True and 2.7 into 2."""
    if type(value) is not kind:
        raise _wrong(value, kind)
    return value


def _read_text(value: Any, kind: Any) -> str:
    """Text that begins with `~/` is a path in the home folder, which a shell leaves as it is after
    `=` and in a file."""
    text: str = _read_exactly(value, kind)
    return str(local_path(text)) if text.startswith("~/") else text


def _read_float(value: Any, kind: Any) -> float:
    """Accept numeric text too, since YAML 1.1 reads 1e-6 as text."""
    try:
        number = math.nan if isinstance(value, bool) else float(value)
    except (OverflowError, TypeError, ValueError):
        number = math.nan
    if not math.isfinite(number):
        raise _wrong(value, kind)
    return number


def _read_literal(value: Any, kind: Any) -> Any:
    """Compare types too: True is not 1."""
    if not any(value == choice and type(value) is type(choice) for choice in get_args(kind)):
        raise _wrong(value, kind)
    return value


def _read_union(value: Any, kind: Any) -> Any:
    """Return None if that is a member, else the value as the first member that fits."""
    members = [member for member in _members(kind) if member is not types.NoneType]
    if value is None and types.NoneType in _members(kind):
        return None
    for member in members:
        try:
            return _converter.structure(value, member)
        except ValueError:
            is_list = isinstance(value, list) and get_origin(member) is tuple
            if len(members) == 1 or is_list:
                raise
    raise _wrong(value, kind)


def _read_tuple(value: Any, kind: Any) -> Any:
    """Accept a single value as a list of one, unless the length is fixed."""
    inner = get_args(kind)
    fixed = ... not in inner
    if value is None or (fixed and not isinstance(value, list | tuple)):
        raise _wrong(value, kind)
    items = value if isinstance(value, list | tuple) else [value]
    if fixed and len(items) != len(inner):
        raise ValueError(f"expected a list of {len(inner)} values, got {len(items)}")
    kinds = inner if fixed else inner[:1] * len(items)
    return tuple(_read_all(zip(map(str, range(len(items))), items, kinds, strict=True)).values())


def _read_any(value: Any, _: Any) -> Any:
    """Accept what JSON has: YAML also makes dates, binary data and sets."""
    if isinstance(value, Mapping):
        return _read_all((str(key), item, Any) for key, item in value.items())
    if isinstance(value, list | tuple):
        numbered = ((str(number), item, Any) for number, item in enumerate(value))
        return [*_read_all(numbered).values()]
    if isinstance(value, date | bytes | set):
        raise _wrong(value, str)
    return value


def _read_dict(value: Any, kind: Any) -> Any:
    if not isinstance(value, Mapping):
        raise _wrong(value, kind)
    return _read_all((str(key), item, get_args(kind)[1]) for key, item in value.items())


def _class_reader(cls: type) -> Callable[[Any, Any], Any]:
    """Return the reader of a class; cattrs' own stops at the first validator that fails."""
    every = attrs.fields(attrs.resolve_types(cls))
    fields = {setting_name(item): item for item in every if item.init}

    def read(value: Any, _: Any) -> Any:
        tree = as_mapping(cls, value)
        problems: list[tuple[Path, str]] = [((str(key),), "") for key in tree if key not in fields]
        problems += [
            ((name,), "is required")
            for name, item in fields.items()
            if name not in tree and item.default is attrs.NOTHING
        ]
        present = [(name, tree[name], item) for name, item in fields.items() if name in tree]
        try:
            values = _read_all(present)
        except ProblemsError as error:
            problems += error.problems
        if problems:
            raise ProblemsError(problems)
        try:
            return cls(**{fields[name].name: item for name, item in values.items()})
        except (TypeError, ValueError) as error:  # A plugin's own check across its fields.
            raise ProblemsError([((), str(error.args[0]))]) from error

    return read


def _read_all(items: Iterable[tuple[str, Any, Any]]) -> dict[str, Any]:
    """Read each (key, value, type or attrs field). Raises ProblemsError with all problems."""
    values: dict[str, Any] = {}
    problems: list[tuple[Path, str]] = []
    for key, value, kind in items:
        try:
            values[key] = _read(value, kind)
        except ProblemsError as error:
            problems += [((key, *path), text) for path, text in error.problems]
        except (TypeError, ValueError) as error:
            problems.append(((key,), _text(error, kind, key)))
    if problems:
        raise ProblemsError(problems)
    return values


def _read(value: Any, kind: Any) -> Any:
    """Return a value as a type or an attrs field. `instead` in the metadata of a field is a
    function that says what to do instead of a value that is not offered."""
    instead = getattr(kind, "metadata", {}).get("instead")
    if text := instead and instead(value):
        raise ValueError(text)
    read = _converter.structure(value, getattr(kind, "type", kind))
    if getattr(kind, "validator", None):
        kind.validator(None, kind, read)
    return read


def _text(error: Exception, kind: Any, key: str) -> str:
    """Return the text of an error without the name of the field, with which validators begin."""
    name = kind.name if isinstance(kind, attrs.Attribute) else key
    return str(error.args[0]).replace(f"'{name}'", f"'{key}'").removeprefix(f"'{key}' ")


def _message(path: Path, text: str, root: type) -> str:
    """Return the message for a problem; for an unknown key with the setting that may be meant."""
    dotted = ".".join(path)
    if text:
        return f"{dotted}: {text}"
    *above, key = path
    section = _at(above, root)
    here = {name: ".".join((*above, name)) for name in map(setting_name, attrs.fields(section))}
    anywhere = _settings(root)
    if reason := getattr(section, "not_offered", {}).get(key):
        return f"{dotted}: {reason}"
    if entries := next((here[name] for name in _with_entries(section, key)), None):
        return f"{dotted}: unknown setting; it belongs in an entry of {entries}"
    if ours := anywhere.get(key) or foreign_names().get(key):
        where = f"{dotted}: " if above else ""
        return f"{where}'{key}' is {ours} here"
    section_name, _, rest = key.partition(".")
    if rest and not above:
        return f"{dotted}: unknown setting; in a file, write `{section_name}: {{{rest}: ...}}`"
    return _unknown(dotted, key, here, anywhere)


@functools.cache
def foreign_names() -> dict[str, str]:
    """Return our name by that of TRL, Axolotl, LLaMA-Factory and OpenRLHF, from a list that is
    generated from the tables of rlhf-migrate."""
    text = pathlib.Path(__file__).with_name("foreign_names.txt").read_text(encoding="utf-8")
    return dict(line.split(" ", 1) for line in text.splitlines())


def _unknown(dotted: str, key: str, here: Mapping[str, str], anywhere: Mapping[str, str]) -> str:
    """Return the message for an unknown key with the setting that may be meant, else with those of
    its section."""
    for names in (here, anywhere):
        if near := nearest(key, names):
            return f"{dotted}: unknown setting; did you mean {names[near]}?"
    return f"{dotted}: unknown setting; available: {', '.join(here) or 'none'}"


def _settings(root: type) -> dict[str, str]:
    """Return the dotted name of each setting by its name in its section."""
    return {
        setting_name(inner): f"{setting_name(item)}.{setting_name(inner)}"
        for item in attrs.fields(root)
        if (kind := section_class(item.type))
        for inner in attrs.fields(kind)
    }


def _with_entries(section: type, key: str) -> Iterator[str]:
    """Yield the settings of a section that are lists of entries with the setting `key`."""
    for item in attrs.fields(section):
        entry = next(filter(attrs.has, get_args(item.type)), None)
        if (
            get_origin(item.type) is tuple
            and entry
            and key in map(setting_name, attrs.fields(entry))
        ):
            yield setting_name(item)


def _at(path: Iterable[str], root: type) -> type:
    """Return the class at `path`."""
    for key in path:
        if not key.isdigit():
            kind = next(item.type for item in attrs.fields(root) if setting_name(item) == key)
            root = section_class(kind) or next(filter(attrs.has, get_args(kind)))
    return root


def _members(kind: Any) -> tuple[Any, ...]:
    return get_args(kind) if get_origin(kind) in (Union, types.UnionType) else ()


_converter = cattrs.Converter()
for _kind in (bool, int):
    _converter.register_structure_hook(_kind, _read_exactly)
_converter.register_structure_hook(str, _read_text)
_converter.register_structure_hook(float, _read_float)
_converter.register_structure_hook_factory(attrs.has, _class_reader)
_converter.register_structure_hook_func(lambda kind: kind is Any, _read_any)
_converter.register_structure_hook_func(lambda kind: get_origin(kind) is Literal, _read_literal)
_converter.register_structure_hook_func(lambda kind: get_origin(kind) is tuple, _read_tuple)
_converter.register_structure_hook_func(lambda kind: get_origin(kind) is dict, _read_dict)
_converter.register_structure_hook_func(lambda kind: bool(_members(kind)), _read_union)
