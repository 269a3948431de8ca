"""Rows on their way from a file to a trainer, and what every row format is read with."""

import itertools
import json
from collections.abc import Mapping, Sequence
from typing import Any

from attrs import field, frozen

from rlhf.data.chat import ChatTemplate, Messages
from rlhf.data.encode import Encoded, Encoder, Marked
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
    """The row as it was read, for what the format does not know, and what the format adds."""


class Reader:
    """What turns text and conversations into token ids."""

    def __init__(self, tokenizer: Any, section: Any = None, *, whole: bool = False) -> None:
        """With `whole` conversations keep what the template writes behind their last turn."""
        self.encoder = Encoder(tokenizer)
        self.chat = ChatTemplate(tokenizer, whole=whole)
        self.separator: str = getattr(section, "separator", "\n")
        """What ends a step where no placeholder does: `separator` of the trainer's section."""
        self.placeholder: str | None = getattr(section, "placeholder", None)
        """What marks the end of a step: `placeholder` of the trainer's section."""


@frozen
class Path:
    """A prompt with one answer, ready to be tokenised."""

    text: Marked
    bare: bool
    """Plain text: BOS must be put before it and EOS after it."""


def row_of_paths(encoded: Sequence[Encoded], columns: Mapping[str, Any]) -> Row:
    """The tree of paths that share a beginning: the prompt is what stands in all of them before
    the first trained token of any."""
    size = min(path.trained[0][0] if path.trained else len(path.ids) for path in encoded)
    prompt = encoded[0].ids[:size]
    for path in encoded[1:]:
        if path.ids[:size] != prompt:
            pairs = zip(path.ids, prompt, strict=False)
            size = next(place for place, (one, other) in enumerate(pairs) if one != other)
            prompt = prompt[:size]
    return Row(prompt, [_answer(path, size) for path in encoded], columns)


def encode_paths(paths: Sequence[Path], reader: Reader) -> list[Encoded]:
    """Of each path its ids with BOS and EOS where it needs them, and which are trained on."""
    encoded = reader.encoder.encode([path.text for path in paths], [path.bare for path in paths])
    eos = reader.encoder.eos
    for path, found in zip(paths, encoded, strict=True):
        if path.bare and eos is not None and found.ids[-1:] != [eos]:
            size = len(found.ids)
            found.ids.append(eos)
            if found.trained and found.trained[-1][1] == size:
                size = found.trained.pop()[0]
            found.trained.append((size, len(found.ids)))
    return encoded


Draft = tuple[list[Path], Mapping[str, Any]]
"""The paths of a row and its columns."""


def encode_drafts(drafts: Sequence[Sequence[Draft]], reader: Reader) -> list[list[Row]]:
    """The trees of each raw row's drafts, all tokenised at once; none of a draft without paths."""
    paths = [path for rows in drafts for found, _ in rows for path in found]
    encoded = iter(encode_paths(paths, reader))
    return [
        [
            row_of_paths(list(itertools.islice(encoded, len(found))), columns)
            for found, columns in rows
            if found
        ]
        for rows in drafts
    ]


def text_path(prompt: str, answer: str) -> Path:
    """Plain text: the answer is trained on, and EOS after it."""
    whole = prompt + answer
    return Path(Marked(whole, ((len(prompt), len(whole)),)), bare=True)


def conversations(row: RawRow, reader: Reader, messages: Messages, *, first: int) -> list[Path]:
    """The rendered conversation: the assistant's turns from message `first` on are trained on.
    Several paths where the template renders history otherwise, none without such a turn."""
    check_template(row, reader)
    tools, keywords = tools_of(row), keywords_of(row)
    try:
        documents = reader.chat.documents(messages, first=first, tools=tools, keywords=keywords)
    except RLHFError as error:
        raise RLHFError(f"{row.where}: {error}") from None
    return [Path(document, bare=False) for document in documents]


def check_template(row: RawRow, reader: Reader) -> None:
    """Raises RLHFError where the tokenizer has no chat template for this conversation."""
    if not reader.chat.present:
        raise RLHFError(
            f"{row.where}: this is a conversation, but the tokenizer has no chat template: "
            "set data.chat_template to a file or to chatml"
        )


def messages_of(row: RawRow, name: str, *, role: str | None = None) -> list[dict[str, Any]]:
    """The messages in a column; a text there is one message of `role`. Raises RLHFError for another
    shape."""
    return as_messages(row, name, row.columns[name], role=role)


def as_messages(
    row: RawRow, name: str, value: Any, *, role: str | None = None
) -> list[dict[str, Any]]:
    """The same for a value that was taken out of column `name`."""
    if isinstance(value, str) and role is not None:
        return [{"role": role, "content": value}]
    if not isinstance(value, Sequence) or isinstance(value, str):
        wanted = "text or a list of messages" if role else "a list of messages"
        raise RLHFError(f"{row.where}: `{name}` must be {wanted}, not {kind(value)}")
    for number, message in enumerate(value):
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise RLHFError(
                f"{row.where}: message {number} of `{name}` has no `role`: "
                f"it is {json.dumps(message, default=str)[:80]}"
            )
        content = message.get("content")
        if not isinstance(content, str | list | None):
            raise RLHFError(
                f"{row.where}: `content` of message {number} of `{name}` must be text or a list of "
                f"parts, not {kind(content)}"
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
        raise RLHFError(f"{row.where}: `tools` must be a list of JSON schemas, not {kind(tools)}")
    return tools or None


def keywords_of(row: RawRow) -> Mapping[str, Any]:
    """What the row hands to its chat template beside the messages."""
    keywords = row.columns.get("chat_template_kwargs") or {}
    if not isinstance(keywords, Mapping):
        raise RLHFError(
            f"{row.where}: `chat_template_kwargs` must be a mapping, not {kind(keywords)}"
        )
    return keywords


def has(row: RawRow, *names: str) -> bool:
    """Whether all these columns are given and not null."""
    return all(row.columns.get(name) is not None for name in names)


def refuse(row: RawRow, needs: str) -> RLHFError:
    """The error for a row without the columns of its format."""
    given = [f"`{name}`" for name, value in row.columns.items() if value is not None]
    return RLHFError(
        f"{row.where}: a row needs {needs}, but this one has {', '.join(given) or 'nothing'}: "
        "rename with columns in data"
    )


def kind(value: Any) -> str:
    """What a value is called in an error text."""
    names = {"dict": "a mapping", "list": "a list", "str": "text", "NoneType": "null"}
    return names.get(type(value).__name__, type(value).__name__)


def _answer(path: Encoded, size: int) -> Answer:
    """What stands after the first `size` tokens."""
    tokens = path.ids[size:]
    if path.trained == [(size, len(path.ids))]:
        return Answer(tokens)
    mask = [False] * len(tokens)
    for start, end in path.trained:
        mask[start - size : end - size] = [True] * (end - start)
    return Answer(tokens, None if all(mask) else mask)
