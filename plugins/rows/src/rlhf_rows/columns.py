"""The checks of a row's columns that the row formats share."""

import json
from collections.abc import Mapping
from typing import Any

from rlhf.errors import RLHFError
from rlhf.formats import Columns


def has(row: Columns, *names: str) -> bool:
    """Return whether the row has all these columns and none of them is null."""
    return all(row.get(name) is not None for name in names)


def type_name(value: Any) -> str:
    """Return what a value is called in an error message."""
    names = {"dict": "a mapping", "list": "a list", "str": "text", "NoneType": "null"}
    return names.get(type(value).__name__, type(value).__name__)


def shown(value: Any) -> str:
    """Return a value of a row for an error message: at most 80 characters of it."""
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def parsed_list(name: str, value: Any, *, of: str = "") -> list[Any]:
    """Return the list in column `name`, which may be JSON text; `of` says what it holds.

    Raises RLHFError for any other value.
    """
    if isinstance(value, str):
        try:
            value = json.loads(value) if value.strip() else []
        except (ValueError, RecursionError):
            raise RLHFError(f"`{name}` is not valid JSON") from None
    if not isinstance(value, list):
        raise RLHFError(f"`{name}` must be a list{of}, not {type_name(value)}")
    return value


def tools_of(row: Columns) -> list[Any] | None:
    """Return the tools of a row: JSON schemas, given as a list or as JSON text."""
    if row.get("tools") is None:
        return None
    tools = parsed_list("tools", row["tools"], of=" of JSON schemas")
    return [json.loads(tool) if _is_object(tool) else tool for tool in tools] or None


def keywords_of(row: Columns) -> Columns:
    """Return the keywords that the row passes to its chat template."""
    keywords = row.get("chat_template_kwargs") or {}
    if not isinstance(keywords, Mapping):
        raise RLHFError(f"`chat_template_kwargs` must be a mapping, not {type_name(keywords)}")
    return keywords


def _is_object(value: Any) -> bool:
    """Return whether a value is the JSON text of an object."""
    try:
        return isinstance(value, str) and isinstance(json.loads(value), dict)
    except (ValueError, RecursionError):
        return False
