"""Content of messages that is a list of parts, or null, for chat templates that print text only."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rlhf.errors import RLHFError

Messages = Sequence[Mapping[str, Any]]
REASONING = ("reasoning", "thinking")
INSTEAD = ("tool_calls", "function_call", "reasoning_content", *REASONING)
"""What a message may have instead of content."""


def readable(messages: Messages, render: Callable[[Messages], str | None]) -> Messages:
    """Return messages of which the template prints no content as a Python value: parts of text are
    joined and null becomes empty text, unless the template renders them itself.

    `render` returns None if the template refuses. Raises RLHFError for a message without content,
    and for a part that is not text and would be printed as a Python value.
    """
    if all(isinstance(message.get("content"), str) for message in messages):
        return messages
    for number, message in enumerate(messages):
        if message.get("content") is None and not any(message.get(key) for key in INSTEAD):
            raise RLHFError(
                f"message {number} (role {message['role']}) has no `content`; give it text, which "
                "may be empty, or remove the row"
            )
    messages, printed = _without_null(messages, render), render(messages)
    return [_joined(number, message, printed) for number, message in enumerate(messages)]


def text_of(part: Any) -> str | None:
    """Return the text of a part, None if it is something else."""
    if isinstance(part, str):
        return part
    is_text = isinstance(part, Mapping) and part.get("type", "text") == "text"
    text = part.get("text") if is_text else None
    return text if isinstance(text, str) else None


def _without_null(messages: Messages, render: Callable[[Messages], str | None]) -> Messages:
    """Return the messages with empty text for null if the template prints null as None."""
    if all(message.get("content") is not None for message in messages):
        return messages
    filled = [{**it, "content": ""} if it.get("content") is None else it for it in messages]
    with_null, with_text = render(messages), render(filled)
    is_printed = with_null is None or with_null.count("None") > (with_text or "").count("None")
    return filled if is_printed else messages


def _joined(number: int, message: Mapping[str, Any], printed: str | None) -> Mapping[str, Any]:
    """Return the message with its parts as one text, unless they are in the rendering `printed` in
    another form than that of Python; None says that the template refuses."""
    parts = message.get("content")
    if not isinstance(parts, list):
        return message
    if parts and printed is not None and not any(repr(part) in printed for part in parts):
        return message
    texts = [text_of(part) for part in parts]
    if None not in texts:
        return {**message, "content": "".join(map(str, texts))}
    if printed is None:
        return message  # The template's own refusal says more.
    kind = next(part for part in parts if text_of(part) is None)
    kind = kind.get("type") if isinstance(kind, Mapping) else kind
    raise RLHFError(
        f"`content` of message {number} (role {message['role']}) has a part of type {kind!r}, "
        "which the chat template cannot render; remove the row or set data.chat_template"
    )
