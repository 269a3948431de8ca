"""Rows as other projects write them: conversations of ShareGPT and instructions of Alpaca, with the
columns that Axolotl, LLaMA-Factory and ms-swift add."""

import json
from collections.abc import Mapping
from typing import Any

from rlhf.data.chat import TRAIN_KEYS
from rlhf.data.columns import Columns, has
from rlhf.errors import RLHFError

ROLES = {
    "human": "user", "user": "user", "gpt": "assistant", "chatgpt": "assistant",
    "assistant": "assistant", "model": "assistant", "function_call": "assistant",
    "system": "system", "tool": "tool", "observation": "tool",
}  # fmt: skip
"""Our role by ShareGPT's `from`."""


def with_our_columns(row: Columns) -> Columns:
    """Return a row of another project under the names of core's row formats, and any other row as
    it is. Raises RLHFError for a message that cannot be read."""
    ours = dict(row)
    if has(row, "conversations") and not has(row, "messages"):
        name = "prompt" if has(row, "chosen", "rejected") else "messages"
        ours[name] = ours.pop("conversations")
    if has(row, "instruction") and not has(row, "prompt"):
        ours["prompt"] = _instruction(row)
        if has(row, "output"):
            ours["completion"] = ours.pop("output")
    if has(row, "messages", "rejected_response") and row["messages"]:
        *ours["prompt"], chosen = ours.pop("messages")
        rejected = {"role": "assistant", "content": ours.pop("rejected_response")}
        ours |= {"chosen": [chosen], "rejected": [rejected]}
    if has(row, "kto_tag"):
        ours["label"] = ours.pop("kto_tag")
    for name in {"messages", "prompt", "completion", "chosen", "rejected"} & ours.keys():
        ours[name] = _as_messages(name, ours[name])
    first = "messages" if has(ours, "messages") else "prompt"
    if has(row, "system") and isinstance(ours.get(first), list):
        ours[first] = _after_system(row["system"], ours[first])
    return ours


def _after_system(text: str, messages: list[Any]) -> list[Any]:
    """Return the messages after one of the system with `text`, unless they begin with their own."""
    first = messages[0] if messages else None
    if isinstance(first, Mapping) and first.get("role") == "system":
        return messages
    return [{"role": "system", "content": text}, *messages]


def _instruction(row: Columns) -> list[dict[str, Any]]:
    """Return the messages before an Alpaca answer: pairs in `history`, and the instruction."""
    turns = [text for pair in row.get("history") or () for text in pair]
    turns.append("\n".join(filter(None, (row["instruction"], row.get("input")))))
    roles = ("user", "assistant")
    return [{"role": roles[n % 2], "content": text} for n, text in enumerate(turns)]


def _as_messages(name: str, value: Any) -> Any:
    """Return ShareGPT's messages, or the only one, as ours; anything else as it is."""
    messages = [value] if isinstance(value, Mapping) else value
    if not isinstance(messages, list) or not any(_is_theirs(message) for message in messages):
        return value
    return [_message(name, number, message) for number, message in enumerate(messages)]


def _is_theirs(message: Any) -> bool:
    return isinstance(message, Mapping) and {"from", "value"} <= message.keys()


def _message(name: str, number: int, message: Any) -> Any:
    if not _is_theirs(message):
        return message
    kind, text = message["from"], message["value"]
    if kind not in ROLES:
        raise RLHFError(
            f"`from` of message {number} of `{name}` is {kind!r}; use one of {', '.join(ROLES)}"
        )
    chosen = {name: message[name] for name in TRAIN_KEYS if name in message}
    if kind != "function_call":
        return {"role": ROLES[kind], "content": text, **chosen}
    try:
        calls = json.loads(text)
    except (TypeError, ValueError):
        raise RLHFError(
            f"message {number} of `{name}` is a function_call, but its `value` is not JSON"
        ) from None
    every = calls if isinstance(calls, list) else [calls]
    tool_calls = [{"type": "function", "function": call} for call in every]
    return {"role": "assistant", "content": "", "tool_calls": tool_calls, **chosen}
