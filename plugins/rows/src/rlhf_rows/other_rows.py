"""Rows as users write them, under the columns of our row formats: conversations of ShareGPT,
instructions of Alpaca, and the columns that OpenAI, Axolotl, LLaMA-Factory and ms-swift add."""

from collections.abc import Mapping
from typing import Any

from rlhf.errors import RLHFError
from rlhf.formats import Columns
from rlhf_rows.columns import has, parsed_list, tools_of, type_name
from rlhf_rows.messages import (
    MEDIA,
    after_system,
    as_messages,
    decoded_messages,
    raise_if_placeholder,
    why_not,
)

TALKS = ("messages", "prompt", "completion", "chosen", "rejected")
"""Columns that may hold messages."""
LISTS = ("answers", "ranks", "scores", "completions", "labels")
"""Columns that hold lists, in CSV as JSON text."""


def with_our_columns(row: Columns) -> dict[str, Any]:
    """Return a row under the names of our row formats, with lists of messages in the form of
    `as_messages`. Raises RLHFError for a message that cannot be read, and for what a model of text
    cannot use."""
    _raise_if_media(row)
    ours = dict(row)
    if has(row, "conversations") and not has(row, "messages"):
        name = "prompt" if has(row, "chosen", "rejected") else "messages"
        ours[name] = ours.pop("conversations")
    if has(row, "instruction") and not has(row, "prompt"):
        ours["prompt"] = _instruction(row)
        if has(row, "output"):
            ours["completion"] = _text("output", ours)
            del ours["output"]
    if has(row, "kto_tag"):
        ours["label"] = ours.pop("kto_tag")
    if has(row, "functions") and not has(row, "tools"):
        functions = parsed_list("functions", ours.pop("functions"))
        ours["tools"] = [{"type": "function", "function": each} for each in functions]
    for name in LISTS:
        if isinstance(row.get(name), str) and row[name].lstrip().startswith("["):
            ours[name] = parsed_list(name, row[name])
    for name in TALKS:
        ours |= _talk(name, ours)
    messages = ours.get("messages")
    if has(row, "rejected_response") and messages and isinstance(messages, list):
        *ours["prompt"], chosen = ours.pop("messages")
        rejected = as_messages("rejected_response", ours.pop("rejected_response"), role="assistant")
        ours |= {"chosen": [chosen], "rejected": rejected}
    return _with_context(ours)


def _talk(name: str, row: Columns) -> dict[str, Any]:
    """Return column `name` of a row with its messages in our form; text stays text."""
    value = decoded_messages(row.get(name))
    if isinstance(value, list | Mapping):
        return {name: as_messages(name, value)}
    if name == "prompt" and isinstance(value, str):
        raise_if_placeholder(f"`{name}`", value)
    return {}


def _with_context(row: dict[str, Any]) -> dict[str, Any]:
    """Return the row with its `system` text at the start of its messages. A text prompt with a
    system text or tools is a message of the user, since they only exist in conversations."""
    system = _text("system", row)
    what = "system" if system.strip() else "tools"
    if what == "tools" and not tools_of(row):
        return row
    if isinstance(row.get("prompt"), str) and not has(row, "messages"):
        prompt = row["prompt"]
        row["prompt"] = [{"role": "user", "content": prompt}] if prompt.strip() else []
    places = [name for name in ("messages", "prompt") if has(row, name)][:1]
    places = places or [name for name in ("chosen", "rejected") if has(row, name)]
    if any(not isinstance(row[name], list) for name in places) or (not places and has(row, "text")):
        name = places[0] if places else "text"
        raise RLHFError(
            f"`{what}` cannot be used beside text in `{name}`; write the row as messages, or "
            f"remove `{what}`"
        )
    if what == "tools":
        return row
    return row | {name: after_system(system, name, row[name]) for name in places}


def _instruction(row: Columns) -> list[dict[str, Any]]:
    """Return the messages before an Alpaca answer: pairs in `history`, and the instruction."""
    history = row.get("history") or []
    if isinstance(history, str) and history.lstrip().startswith("["):
        history = parsed_list("history", history)
    if not isinstance(history, list) or not all(map(_is_pair, history)):
        raise RLHFError("`history` must be a list of pairs of texts, [[question, answer], ...]")
    turns = [text for pair in history for text in pair]
    parts = [_text(name, row) for name in ("instruction", "input")]
    turns.append("\n".join(filter(None, parts)))
    roles = ("user", "assistant")
    return [{"role": roles[n % 2], "content": text} for n, text in enumerate(turns)]


def _is_pair(value: Any) -> bool:
    return isinstance(value, list) and [*map(type, value)] == [str, str]


def _text(name: str, row: Columns) -> str:
    """Return the text in a column, empty if the row does not have it."""
    value = row.get(name)
    if not isinstance(value, str | None):
        raise RLHFError(f"`{name}` must be text, not {type_name(value)}")
    return value or ""


def _raise_if_media(row: Columns) -> None:
    for name in (*MEDIA, *(f"{medium}s" for medium in MEDIA)):
        if row.get(name):
            raise RLHFError(
                f"the row has `{name}`, but {why_not(name)}; remove the column or the row"
            )
