"""Prompts with the tools that the policy may call."""

from collections.abc import Mapping, Sequence
from typing import Any

from rlhf.errors import RLHFError
from rlhf_rows import (
    Columns,
    Reader,
    Rendered,
    Row,
    Unencoded,
    as_messages,
    read_row,
    render_prompt,
)

PROMPT, TOOLS = "prompt", "tools"
"""Columns of a row."""


def with_tools(
    columns: Mapping[str, Any], schemas: Sequence[Mapping[str, Any]], tokenizer: Any
) -> Row:
    """Return a row of the format `prompt` whose prompt says which tools there are. Raises RLHFError
    for one that is not a conversation, or has tools of its own."""
    if isinstance(columns[PROMPT], str):
        raise RLHFError("`prompt` is text, but tools need a list of messages; rewrite the row")
    if columns.get(TOOLS):
        raise RLHFError("the row has `tools`, and so have the settings; remove one of the two")
    (row,) = read_row(read, {**columns, TOOLS: list(schemas)}, tokenizer)
    return row


def read(row: Columns, reader: Reader) -> list[Unencoded]:
    """Read a prompt that the policy answers."""
    return [([Rendered(render_prompt(row, reader), ())], lambda paths: Row(paths[0].ids, [], row))]


def continued(prompt: Any, text: str) -> list[dict[str, Any]]:
    """Return the messages of the column `prompt`, the last of which ends with the text with which
    an environment begins, as in TRL."""
    *before, last = as_messages(PROMPT, prompt)
    content: Any = last.get("content") or ""
    added = text if isinstance(content, str) else [{"type": "text", "text": text}]
    return [*before, {**last, "content": content + added}]
