"""The row formats: what users write in their files becomes token ids that a trainer can use as they
are."""

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from attrs import field, frozen

from rlhf.data.chat import ChatTemplate, Messages
from rlhf.data.encode import Encoder, Marked
from rlhf.data.example import Answer
from rlhf.errors import RLHFError


@frozen
class RawRow:
    """A row as it was read."""

    where: str
    """Path and line, for error texts."""
    columns: Mapping[str, Any]


@frozen
class Row:
    """A row of a named format as the trainer's `example` gets it."""

    prompt: list[int]
    answers: list[Answer]
    columns: Mapping[str, Any] = field(factory=dict)
    """The row as it was read, for what the format does not know."""


class Reader:
    """What turns text and conversations into token ids."""

    def __init__(self, tokenizer: Any) -> None:
        self.encoder = Encoder(tokenizer)
        self.chat = ChatTemplate(tokenizer)


Format = Callable[[Sequence[RawRow], Reader], list[list[Row]]]
"""`(raw rows, reader) -> for each raw row its rows`: none if there is nothing to train on, several
if a conversation had to be split."""


def demonstrations(raw: Sequence[RawRow], reader: Reader) -> list[list[Row]]:
    """`messages`, `text`, or `prompt` with `completion` (text or message lists), with `tools`."""
    documents: list[Marked] = []
    closed: list[bool] = []
    counts = []
    for row in raw:
        found, ends = _demonstration(row, reader)
        documents += found
        closed += [ends] * len(found)
        counts.append(len(found))
    encoded = iter(zip(reader.encoder.encode(documents), closed, strict=True))
    return [
        [_row(*next(encoded), reader.encoder.eos, row.columns) for _ in range(count)]
        for row, count in zip(raw, counts, strict=True)
    ]


FORMATS: dict[str, Format] = {"demonstration": demonstrations}


def format_of(name: str) -> Format:
    """The format that a trainer names in `rows`."""
    if name not in FORMATS:
        raise RLHFError(f"there is no row format {name!r}: there are {', '.join(sorted(FORMATS))}")
    return FORMATS[name]


def _demonstration(row: RawRow, reader: Reader) -> tuple[list[Marked], bool]:
    """The texts of one row, and whether EOS must be put after them."""
    columns = row.columns
    if columns.get("messages") is not None:
        return _conversation(row, reader, messages_of(row, "messages"), first=0), False
    if columns.get("prompt") is not None and columns.get("completion") is not None:
        prompt, completion = columns["prompt"], columns["completion"]
        if isinstance(prompt, str) and isinstance(completion, str):
            return [Marked(prompt + completion, ((len(prompt), len(prompt + completion)),))], True
        before = messages_of(row, "prompt", role="user")
        after = messages_of(row, "completion", role="assistant")
        return _conversation(row, reader, [*before, *after], first=len(before)), False
    if columns.get("text") is not None:
        text = columns["text"]
        if not isinstance(text, str):
            raise RLHFError(f"{row.where}: `text` must be text, not {_kind(text)}")
        return [Marked(text, ((0, len(text)),))] if text else [], True
    raise RLHFError(
        f"{row.where}: a row needs `messages`, `text`, or `prompt` and `completion`, "
        f"but this one has {_names(columns)}: rename with columns in data"
    )


def _conversation(row: RawRow, reader: Reader, messages: Messages, *, first: int) -> list[Marked]:
    if not reader.chat.present:
        raise RLHFError(
            f"{row.where}: this is a conversation, but the tokenizer has no chat template: "
            "set data.chat_template to a file or to chatml"
        )
    keywords = row.columns.get("chat_template_kwargs") or {}
    try:
        return reader.chat.documents(messages, first=first, tools=tools_of(row), keywords=keywords)
    except RLHFError as error:
        raise RLHFError(f"{row.where}: {error}") from None


def _row(
    encoded: tuple[list[int], list[bool]], ends: bool, eos: int | None, columns: Mapping[str, Any]
) -> Row:
    """The prompt is everything before the first trained token."""
    ids, trained = encoded
    if ends and eos is not None and ids[-1:] != [eos]:
        ids, trained = [*ids, eos], [*trained, True]
    start = trained.index(True) if True in trained else len(ids)
    rest = trained[start:]
    mask = None if all(rest) else rest
    return Row(ids[:start], [Answer(ids[start:], mask)], columns)


def messages_of(row: RawRow, name: str, *, role: str | None = None) -> list[dict[str, Any]]:
    """The messages in a column; a text there is one message of `role`. Raises RLHFError for another
    shape."""
    value = row.columns[name]
    if isinstance(value, str) and role is not None:
        return [{"role": role, "content": value}]
    if not isinstance(value, Sequence) or isinstance(value, str):
        raise RLHFError(f"{row.where}: `{name}` must be a list of messages, not {_kind(value)}")
    for number, message in enumerate(value):
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise RLHFError(
                f"{row.where}: message {number} of `{name}` has no `role`: "
                f"it is {json.dumps(message, default=str)[:80]}"
            )
    return list(value)


def tools_of(row: RawRow) -> list[Any] | None:
    """The tools of a row: JSON schemas, as a list or as JSON text."""
    tools = row.columns.get("tools")
    if isinstance(tools, str):
        try:
            tools = json.loads(tools) if tools else None
        except ValueError:
            raise RLHFError(f"{row.where}: `tools` is not valid JSON") from None
    if tools is not None and not isinstance(tools, list):
        raise RLHFError(f"{row.where}: `tools` must be a list of JSON schemas, not {_kind(tools)}")
    return tools or None


def _kind(value: Any) -> str:
    names = {"dict": "a mapping", "list": "a list", "str": "text"}
    return names.get(type(value).__name__, type(value).__name__)


def _names(columns: Mapping[str, Any]) -> str:
    given = [name for name, value in columns.items() if value is not None]
    return ", ".join(f"`{name}`" for name in given) or "nothing"
