"""The shapes of what a run folder records. An entry of another shape is damaged."""

from collections.abc import Mapping
from typing import Any


def is_number(value: Any) -> bool:
    """Return whether a value is a finite number that can be drawn."""
    return type(value) in (int, float) and abs(value) < 1e300


def is_count(value: Any) -> bool:
    """Return whether a value is a number of things."""
    return type(value) is int and 0 <= value < 2**53


def fits(value: Any, shape: Any) -> bool:
    """Return whether plain data has a shape.

    A shape is a type, None, a function such as `is_number`, a tuple of alternatives, `[shape]` for
    a list, `{str: shape}` for a mapping with any keys, or a mapping with the shape of each key,
    which may be absent if its name here ends with `?`.
    """
    if isinstance(shape, tuple):
        return any(fits(value, each) for each in shape)
    if isinstance(shape, list):
        return isinstance(value, list) and all(fits(each, shape[0]) for each in value)
    if isinstance(shape, dict):
        return isinstance(value, dict) and all(
            fits(value.get(name), inner) for name, inner in _keys(value, shape)
        )
    if isinstance(shape, type):
        return type(value) is shape
    return value is None if shape is None else bool(shape(value))


def _keys(value: Mapping[str, Any], shape: Mapping[Any, Any]) -> list[tuple[str, Any]]:
    """Return the keys that a mapping should have, with their shapes."""
    if str in shape:
        return [(name, shape[str]) for name in value]
    names = {name.removesuffix("?"): (name, inner) for name, inner in shape.items()}
    return [
        (name, inner)
        for name, (written, inner) in names.items()
        if name in value or name == written
    ]


_COUNTS = ("rows", "examples", "tokens", "trained", "labels", "too_long", "cut", "empty")
_ENTRIES = ([{"path": str}], None)
_SECONDS = ({str: is_number}, None)
_TEXT = (str, None)

CONFIG = {"model": {"path": str}, "data": {"train?": _ENTRIES, "eval?": _ENTRIES}}
PLAN = {str: {"model?": ({"path": str}, None), "task?": _TEXT}}
VERSIONS = {"trainer": str}
SUMMARY = {
    "steps": (is_count, None), "ended": _TEXT, "error": _TEXT, "devices": _TEXT,
    "seconds": _SECONDS, "startup": _SECONDS,
    "data": {str: {f"{name}?": is_count for name in _COUNTS}},
    "memory": ({"peak": is_number, "device": is_number, "parts": {str: is_number}}, None),
}  # fmt: skip
"""The entries of these files that are read; the page shows others as they are."""
SAMPLE = {
    "row": str, "prompt": str, "answers": [str], "scores?": [(int, float, [(int, float)])],
}  # fmt: skip
"""A line of samples.jsonl. Scores may be nan."""
