"""Messages as users write them, in the one form that chat templates see.

The form is the one that transformers' templates expect: a `role`, a `content` (text, a list of
parts or null), and further keys only if they have a value. What a message says depends neither on
the project that wrote it nor on the file that holds it.
"""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rlhf.errors import RLHFError
from rlhf.formats import BadImage
from rlhf_rows.columns import shown, type_name

Message = Mapping[str, Any]
Messages = Sequence[Message]
ROLES = {
    "human": "user", "user": "user", "prompter": "user",
    "gpt": "assistant", "chatgpt": "assistant", "assistant": "assistant", "model": "assistant",
    "bot": "assistant", "ai": "assistant", "function_call": "assistant", "tool_call": "assistant",
    "system": "system", "tool": "tool", "observation": "tool", "tool_response": "tool",
    "function_response": "tool",
}  # fmt: skip
"""The role of a template by that of another project, in lower case."""
CALLS = ("function_call", "tool_call")
"""Roles of messages whose content is a call of a function, or a list of them, as JSON text."""
SYSTEM = ("system", "developer")
KNOWN_ROLES = {*ROLES.values(), "developer", "function", "ipython"}
"""Roles that templates of published models know."""
TRAIN_KEYS = ("weight", "train", "loss")
"""Keys of a message by which rows of OpenAI, Axolotl and ms-swift choose what is trained on."""
TEXT_PARTS = ("input_text", "output_text")
"""Types of text parts in OpenAI's Responses API."""
MEDIA = ("image", "video", "audio")
PLACEHOLDER = re.compile(
    r"^[ \t]*<(image|video|audio)>|<(image|video|audio)>[ \t]*$"
    r"|<\|(?:image|video|audio)(?:_pad)?\|>|<\|vision_start\|>|<start_of_image>",
    re.MULTILINE,
)
"""What stands for an image, a video or a sound in the text of other projects."""


def why_not(medium: str) -> str:
    """Return why a medium is refused where no reader of images has replaced it."""
    if "image" in medium:
        return "only rows that a row format reads may have images"
    return "models are trained on text and images only"


def as_messages(name: str, value: Any, *, role: str | None = None) -> list[dict[str, Any]]:
    """Return `value`, taken from column `name`, as messages; text is one message of `role`.

    Text that is a JSON list of messages is read as that list: CSV and some tables hold
    conversations as text. Raises RLHFError for any other shape.
    """
    value = decoded_messages(value)
    if isinstance(value, str) and role is not None:
        return [{"role": role, "content": value}]
    if isinstance(value, Mapping):
        value = [value]
    if not isinstance(value, Sequence) or isinstance(value, str):
        wanted = "text or a list of messages" if role else "a list of messages"
        raise RLHFError(f"`{name}` must be {wanted}, not {type_name(value)}")
    messages = [_message(f"message {n} of `{name}`", message) for n, message in enumerate(value)]
    if any(message.get("function_call") for message in value):
        # The older form of OpenAI's calls, in which a result has the role function.
        messages = [{**it, "role": "tool"} if it["role"] == "function" else it for it in messages]
    blank = [_is_blank_system(message) for message in value]
    return [it for it, is_blank in zip(messages, blank, strict=True) if not is_blank]


def decoded_messages(value: Any) -> Any:
    """Return the messages that a text holds as JSON, and any other value as it is."""
    if not isinstance(value, str) or not value.lstrip().startswith("["):
        return value
    messages = _parsed(value)
    is_list = isinstance(messages, list) and all(
        isinstance(message, Mapping) and {"role", "from"} & message.keys() for message in messages
    )
    return messages if is_list and messages else value


def after_system(text: str, name: str, messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the messages of column `name` after a system message with `text`.

    Raises RLHFError if they begin with another one.
    """
    if not messages or messages[0]["role"] not in SYSTEM:
        return [{"role": "system", "content": text}, *messages]
    if not same_message(messages[0], {**messages[0], "content": text}):
        raise RLHFError(f"`system` differs from the system message of `{name}`; remove one of them")
    return messages


def same_message(one: Message, other: Message) -> bool:
    """Return whether two messages say the same: blanks around their text do not count, nor do keys
    that choose what is trained on."""
    return one is other or _meaning(one) == _meaning(other)


def text_of(part: Any) -> str | None:
    """Return the text of a part of a message's content, None if it is something else."""
    if isinstance(part, str):
        return part
    is_text = isinstance(part, Mapping) and part.get("type", "text") == "text"
    text = part.get("text") if is_text else None
    return text if isinstance(text, str) else None


def images_in(messages: Messages) -> tuple[int, ...] | None:
    """Return the numbers of the images in messages, None if there are none."""
    contents = (message.get("content") for message in messages)
    parts = (part for content in contents if isinstance(content, list) for part in content)
    images = (part.get("image") for part in parts if isinstance(part, Mapping))
    return tuple(image for image in images if image is not None) or None


def with_arguments(message: Message, form: Callable[[Any], Any]) -> Message:
    """Return the message with `form` of the arguments of each of its calls."""
    if not message.get("tool_calls"):
        return message
    return {**message, "tool_calls": [_with_arguments(it, form) for it in message["tool_calls"]]}


def arguments_as_object(arguments: Any) -> Any:
    """Return the arguments of a call as an object if they are the JSON text of one; blank text is
    an object without keys."""
    if not isinstance(arguments, str):
        return arguments
    value = _parsed(arguments) if arguments.strip() else {}
    return value if isinstance(value, Mapping) else arguments


def arguments_as_text(arguments: Any) -> Any:
    """Return the arguments of a call as JSON text."""
    return arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)


def raise_if_placeholder(where: str, text: str) -> None:
    """Raise BadImage, which begins with `where`, if a text has a place for an image or a sound."""
    found = PLACEHOLDER.search(text) if "<" in text else None
    if found is None or any(tag and f"</{tag}>" in text for tag in found.groups()):
        return  # A tag that is closed is markup.
    tag = found.group().strip()
    wanted = "for which the row has no image; add the image, remove the row"
    if "video" in tag or "audio" in tag:
        wanted = f"but {why_not(tag)}; remove the row"
    raise BadImage(f"{where} has the placeholder {tag}, {wanted}, or set data.bad_images to drop")


def _message(where: str, message: Any) -> dict[str, Any]:
    """Return a message in the form of this module. Errors begin with `where`."""
    given = message if isinstance(message, Mapping) else {}
    ours = {key: value for key, value in given.items() if value is not None}
    source = "role" if "role" in ours else "from"
    written = ours.pop(source, None)
    if not isinstance(written, str) or not written.strip() or not written.isprintable():
        raise RLHFError(f"{where} has no `role`: {_json(message)}")
    kind = written.strip().lower().replace("-", "_").replace(" ", "_")
    if source == "from" and kind not in ROLES:
        raise RLHFError(f"`from` of {where} is {shown(written)}; use one of {', '.join(ROLES)}")
    role = ROLES.get(kind, written)
    named = "content" if source == "role" or "content" in ours else "value"
    content = _content(f"`{named}` of {where}", ours.pop(named, None))
    calls = ours.pop("tool_calls", None) or ours.pop("function_call", None)
    if kind in CALLS:
        calls, content = _parsed(content), ""
        if not isinstance(calls, list | Mapping):
            raise RLHFError(f"{where} is a {kind}, but its `{named}` is not JSON")
    if role != "assistant":
        for part in content if isinstance(content, list) else [content]:
            raise_if_placeholder(where, text_of(part) or "")
    ours = {"role": role, "content": content, **ours}
    every = _calls(where, calls)
    return {**ours, "tool_calls": every} if every else ours


def _content(name: str, content: Any) -> str | list[Any] | None:
    if isinstance(content, list):
        return [_part(name, part) for part in content]
    if not isinstance(content, str | None):
        raise RLHFError(f"{name} must be text or a list of parts, not {type_name(content)}")
    return content


def _part(name: str, part: Any) -> Any:
    """Return a part of a content without null keys, and text under the type `text`."""
    if not isinstance(part, Mapping):
        return part
    ours = {key: value for key, value in part.items() if value is not None}
    kind = str(ours.get("type", next(iter(ours), "")))
    if kind == "image" and isinstance(ours.get("image"), int):
        return ours  # The reader of images has it.
    if any(medium in kind for medium in MEDIA):
        raise RLHFError(
            f"{name} has a part of type {shown(kind)}, but {why_not(kind)}; remove the row"
        )
    return {**ours, "type": "text"} if kind in TEXT_PARTS else ours


def _calls(where: str, calls: Any) -> list[dict[str, Any]]:
    """Return the calls of functions in a message: one, or a list, or the JSON text of these."""
    every = _parsed(calls) if isinstance(calls, str) and calls.strip() else calls or []
    every = [every] if isinstance(every, Mapping) else every
    if not isinstance(every, list) or not all(isinstance(call, Mapping) for call in every):
        raise RLHFError(f"`tool_calls` of {where} must be a list of calls, not {shown(calls)}")
    return [_call(call) for call in every]


def _call(call: Message) -> dict[str, Any]:
    """Return a call of a function, with the function's name and arguments under `function`."""
    ours = {key: value for key, value in call.items() if value is not None}
    if "function" not in ours and "name" in ours:
        outer = {key: ours.pop(key) for key in ("id", "type") if key in ours}
        return {"type": "function"} | outer | {"function": _function(ours)}
    return {
        key: _function(value) if key == "function" and isinstance(value, Mapping) else value
        for key, value in ours.items()
    }


def _function(function: Message) -> dict[str, Any]:
    """Return the name and the arguments of a call in this order, in which templates print them."""
    ours = {key: value for key, value in function.items() if value is not None}
    name = {"name": ours.pop("name")} if "name" in ours else {}
    return {**name, "arguments": ours.pop("arguments", {}), **ours}


def _with_arguments(call: Message, form: Callable[[Any], Any]) -> Message:
    function = call.get("function")
    if not isinstance(function, Mapping):
        return call
    return {**call, "function": {**function, "arguments": form(function.get("arguments", {}))}}


def _meaning(message: Message) -> dict[str, Any]:
    """Return what of a message decides whether another one says the same."""
    content = message.get("content")
    if isinstance(content, list):
        texts = [text_of(part) for part in content]
        content = content if None in texts else "".join(map(str, texts))
    decoded = with_arguments(message, arguments_as_object)
    rest = {key: value for key, value in decoded.items() if key not in TRAIN_KEYS}
    return {**rest, "content": content.strip() if isinstance(content, str) else content or ""}


def _is_blank_system(message: Message) -> bool:
    """Return whether a message of ShareGPT is a system message without text, which means none. In a
    list with roles, an empty one is an instruction to a template that has a default."""
    is_system = str(message.get("from")).strip().lower() == "system"
    return is_system and not str(message.get("value") or "").strip()


def _json(value: Any) -> str:
    return json.dumps(value, default=str)[:80]


def _parsed(text: Any) -> Any:
    """Return the JSON value in a text, None if it has none."""
    try:
        return json.loads(text)
    except (TypeError, ValueError, RecursionError):
        return None
