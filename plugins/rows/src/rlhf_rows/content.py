"""Changes of a conversation for the sake of a chat template: content that is null or a list of
parts, and arguments of calls, in the form that the template reads."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from rlhf.errors import RLHFError
from rlhf_rows.columns import shown
from rlhf_rows.messages import (
    Messages,
    arguments_as_object,
    arguments_as_text,
    text_of,
    with_arguments,
)

Render = Callable[[Messages], str | None]
"""Returns a rendered conversation, None if the template refuses."""
REASONING = ("reasoning", "thinking")
INSTEAD = ("tool_calls", "reasoning_content", *REASONING)
"""What a message may have instead of content."""


def readable(messages: Messages, render: Render) -> Messages:
    """Return messages of which the template prints nothing as a Python value: null becomes empty
    text, parts of text are joined, and arguments of calls become JSON text, each unless the
    template renders it itself. Arguments that are JSON text are decoded first, as by servers.

    Raises RLHFError for a message without content, and for a part that is not text and would be
    printed as a Python value.
    """
    has_calls = any(message.get("tool_calls") for message in messages)
    if not has_calls and all(isinstance(message.get("content"), str) for message in messages):
        return messages
    for number, message in enumerate(messages):
        if message.get("content") is None and not any(message.get(key) for key in INSTEAD):
            raise RLHFError(
                f"message {number} (role {message['role']}) has no `content`; give it text, which "
                "may be empty, or remove the row"
            )
    formed, printed = _formed(messages, render)
    return [_joined(number, message, printed) for number, message in enumerate(formed)]


def without_refused_system(messages: Messages, render: Render) -> Messages:
    """Return the messages without a blank system message, if the template refuses them with it."""
    first = messages[0] if messages else {}
    if first.get("role") != "system" or str(first.get("content") or "").strip():
        return messages
    refused = render(messages) is None and render(messages[1:]) is not None
    return messages[1:] if refused else messages


def _formed(messages: Messages, render: Render) -> tuple[Messages, str | None]:
    """Return the messages with arguments of calls as objects, or as text if only that is rendered;
    and their rendering."""
    objects, text = (
        _without_null([with_arguments(it, form) for it in messages], render)
        for form in (arguments_as_object, arguments_as_text)
    )
    printed = render(objects)
    if printed is not None and not any(repr(it) in printed for it in _arguments(objects)):
        return objects, printed
    printed_text = render(text)
    return (objects, printed) if printed_text is None else (text, printed_text)


def _arguments(messages: Messages) -> Iterator[Any]:
    """Yield the arguments of all calls that are objects with keys."""
    for message in messages:
        for call in message.get("tool_calls") or ():
            function = call.get("function")
            arguments = function.get("arguments") if isinstance(function, Mapping) else None
            if isinstance(arguments, Mapping) and arguments:
                yield arguments


def _without_null(messages: Messages, render: Render) -> Messages:
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
        f"`content` of message {number} (role {message['role']}) has a part of type {shown(kind)}, "
        "which the chat template cannot render; remove the row or set data.chat_template"
    )
