"""The checks of a row's columns that the row formats share."""

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from rlhf.errors import Place, RLHFError

Columns = Mapping[str, Any]
"""A row as it was read."""


class MissingColumn(RLHFError, KeyError):
    """A column that a trainer reads and the row does not have; also a KeyError, which a trainer may
    expect."""

    __str__ = Exception.__str__


class OwnRow(dict[str, Any]):
    """A row of a trainer's own format, which names the columns it has if one is missing."""

    def __missing__(self, name: str) -> Any:
        raise MissingColumn(str(missing_columns(self, f"`{name}`")))


@contextmanager
def errors_at(where: str, call: str = "reading a row") -> Iterator[None]:
    """Put `where` before an RLHFError of this block, and note on any other error that `call`, such
    as a trainer's method, failed there."""
    try:
        yield
    except RLHFError as error:
        raise RLHFError(f"{where}: {error}") from error
    except Exception as error:
        error.add_note(Place(f"{call} failed with {where}"))
        raise


def has(row: Columns, *names: str) -> bool:
    """Return whether the row has all these columns and none of them is null."""
    return all(row.get(name) is not None for name in names)


def missing_columns(row: Columns, needs: str) -> RLHFError:
    """Return the error for a row without the columns of its format."""
    names = [f"`{name}`" for name, value in row.items() if value is not None]
    return RLHFError(
        f"a row needs {needs}, but this one has {', '.join(names) or 'nothing'}; "
        "rename columns with `columns` in data"
    )


def type_name(value: Any) -> str:
    """Return what a value is called in an error message."""
    names = {"dict": "a mapping", "list": "a list", "str": "text", "NoneType": "null"}
    return names.get(type(value).__name__, type(value).__name__)


def as_messages(name: str, value: Any, *, role: str | None = None) -> list[dict[str, Any]]:
    """Return `value`, taken from column `name`, as messages; text is one message of `role`.

    Raises RLHFError for any other shape.
    """
    if isinstance(value, str) and role is not None:
        return [{"role": role, "content": value}]
    if not isinstance(value, Sequence) or isinstance(value, str):
        wanted = "text or a list of messages" if role else "a list of messages"
        raise RLHFError(f"`{name}` must be {wanted}, not {type_name(value)}")
    for number, message in enumerate(value):
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            shown = json.dumps(message, default=str)[:80]
            raise RLHFError(f"message {number} of `{name}` has no `role`: {shown}")
        content = message.get("content")
        if not isinstance(content, str | list | None):
            raise RLHFError(
                f"`content` of message {number} of `{name}` must be text or a list of parts, "
                f"not {type_name(content)}"
            )
    return list(value)


def tools_of(row: Columns) -> list[Any] | None:
    """Return the tools of a row: JSON schemas, given as a list or as JSON text."""
    tools = row.get("tools")
    if isinstance(tools, str):
        try:
            tools = json.loads(tools) if tools else None
        except ValueError:
            raise RLHFError("`tools` is not valid JSON") from None
    if tools is not None and not isinstance(tools, list):
        raise RLHFError(f"`tools` must be a list of JSON schemas, not {type_name(tools)}")
    return tools or None


def keywords_of(row: Columns) -> Columns:
    """Return the keywords that the row passes to its chat template."""
    keywords = row.get("chat_template_kwargs") or {}
    if not isinstance(keywords, Mapping):
        raise RLHFError(f"`chat_template_kwargs` must be a mapping, not {type_name(keywords)}")
    return keywords
