"""Rows with images, as users write them, become rows in which messages have a part for each image,
and the images beside them, in order."""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from attrs import define, field, frozen

from rlhf.errors import RLHFError, counted
from rlhf.formats import BadImage
from rlhf_rows import Columns, has, missing_columns, type_name
from rlhf_vision.opening import DROP

PROMPTS = ("messages", "conversations", "prompt")
ANSWERS = ("completion", "chosen", "rejected", "answers", "rejected_response")
ASSISTANTS = ("assistant", "gpt", "chatgpt", "model", "bot", "ai")
PART_KINDS = ("image", "image_url", "input_image")
TAG = "<image>"
VALUES = ("image", "image_url", "url", "path", "base64", "data")
"""Keys of a part under which projects put its image."""


@frozen
class Placeholders:
    """What stands for an image in text."""

    token: str
    """The token of the model's processor, of which a chat template writes one for each image."""
    pattern: re.Pattern[str]
    """What stands for an image in the text of a row."""
    written: str
    """The token as a chat template writes it, perhaps between two others."""

    @classmethod
    def of(cls, token: str, start: str = "", end: str = "") -> "Placeholders":
        """Return `<image>` and the model's own token, perhaps between those that the model's chat
        template writes around an image."""
        own = f"(?:{re.escape(start)})?{re.escape(token)}(?:{re.escape(end)})?"
        return cls(token, re.compile(f"{own}|{TAG}"), start + token + end)

    def split(self, text: str) -> list[str]:
        """Return the text between placeholders."""
        # A tag that is closed is markup.
        return [text] if "</image>" in text else self.pattern.split(text)

    def in_plain(self, text: str) -> tuple[str, int]:
        """Return plain text, in which no chat template writes what belongs around an image, and how
        many images it has. What the row has of the model's tokens stays as it is."""
        count = len(self.split(text)) - 1
        own = self.pattern.sub(lambda found: self.written if found[0] == TAG else found[0], text)
        return (own if count else text), count


@define
class Shaper:
    """Brings one row into the shape in which row formats read it."""

    placeholders: Placeholders
    parts: dict[str, list[dict[str, Any]]] = field(factory=dict)
    """The parts of images in each column, in order."""
    texts: dict[str, int] = field(factory=dict)
    """The number of placeholders in each column of plain text."""

    def shape(self, row: Columns) -> tuple[dict[str, Any], list[Any]]:
        """Return the row and the values of its images. Raises BadImage if they do not match its
        placeholders, and RLHFError for a row without a prompt that they could belong to."""
        if row.get("rejected_images"):
            raise RLHFError(
                "the row has `rejected_images`, but all answers have the images of one prompt; "
                "remove the column, or the row"
            )
        ours = _with_prompt(row)
        given = _given(ours)
        for name in (*PROMPTS, *ANSWERS):
            if has(ours, name):
                ours[name] = self._column(name, decoded(ours[name]))
        if isinstance(ours.get("text"), str):
            ours["text"], self.texts["text"] = self.placeholders.in_plain(ours["text"])
        if given and not any(self.parts.values()) and not any(self.texts.values()):
            self._insert(ours, len(given))
            if not self.parts and not any(has(ours, name) for name in (*PROMPTS, "text")):
                raise missing_columns(row, "`messages`, `prompt` or `text` beside its images")
        return ours, self._numbered(given)

    def _column(self, name: str, value: Any) -> Any:
        """Return a column whose messages have parts for images; text of an answer stays as it
        is."""
        if isinstance(value, str):
            return self._question(name, value) if name == "prompt" else value
        is_column = isinstance(value, Mapping | list)
        if not is_column or (isinstance(value, Mapping) and not {"role", "from"} & value.keys()):
            return value  # The row format refuses it.
        if isinstance(value, Mapping):
            return self._message(name, value)
        if name == "answers":
            return [self._column(f"answers[{n}]", decoded(each)) for n, each in enumerate(value)]
        return [self._message(name, each) if isinstance(each, Mapping) else each for each in value]

    def _question(self, name: str, text: str) -> Any:
        """Return the text of a prompt, which is a message of the user if it has an image: only
        conversations have them."""
        content = self._content(name, text)
        return text if content == text else [{"role": "user", "content": content}]

    def _message(self, name: str, message: Mapping[str, Any]) -> dict[str, Any]:
        key = "content" if message.get("content") is not None else "value"
        content = message.get(key)
        role = str(message.get("role") or message.get("from")).strip().lower()
        if role in ASSISTANTS and not isinstance(content, list):
            return dict(message)
        before = len(self.parts.get(name, ()))
        content = self._content(name, content)
        if role in ASSISTANTS and len(self.parts.get(name, ())) > before:
            raise RLHFError(
                f"a message of `{name}` (role {role}) has an image, but models answer with text; "
                "move it to a turn of the user, or remove the row"
            )
        return {**message, key: content}

    def _content(self, name: str, content: Any) -> Any:
        """Return content with a part for each placeholder and for each part with an image."""
        if isinstance(content, str):
            pieces = self.placeholders.split(content)
            return content if len(pieces) == 1 else list(self._joined(name, pieces))
        if isinstance(content, Mapping):
            content = [content]
        if not isinstance(content, list | tuple):
            return content
        if any(map(is_image, content)):
            return [self._new(name, part) if is_image(part) else part for part in content]
        out: list[Any] = []
        for part in content:
            text = part.get("text") if isinstance(part, Mapping) else part
            pieces = self.placeholders.split(text) if isinstance(text, str) else []
            out += self._joined(name, pieces) if len(pieces) > 1 else [part]
        return out

    def _joined(self, name: str, pieces: Sequence[str]) -> Iterator[dict[str, Any]]:
        for number, piece in enumerate(pieces):
            if number:
                yield self._new(name, {})
            if piece:
                yield {"type": "text", "text": piece}

    def _new(self, name: str, part: Mapping[str, Any]) -> dict[str, Any]:
        """Return the part of the next image of a column, which keeps the value that `part` has."""
        key = next((key for key in VALUES if part.get(key) is not None), "")
        value = part.get(key)
        if isinstance(value, Mapping) and "url" in value:
            value = value["url"]
        if key == "base64" and isinstance(value, str) and not value.startswith("data:"):
            value = f"data:;base64,{value}"
        made = {"type": "image", "image": value}
        self.parts.setdefault(name, []).append(made)
        return made

    def _insert(self, row: dict[str, Any], count: int) -> None:
        """Put all images of a row without placeholders before the text of its first turn of the
        user, as TRL does."""
        for name in (*PROMPTS, *ANSWERS):
            talk = row.get(name)
            if name == "prompt" and isinstance(talk, str):
                talk = row[name] = [{"role": "user", "content": talk}]
            roles = [_role(message) for message in talk] if isinstance(talk, list) else []
            place = next((n for n, role in enumerate(roles) if role in ("user", "human")), None)
            if place is None or not isinstance(talk, list):
                continue
            message = dict(talk[place])
            key = "content" if message.get("content") is not None else "value"
            content = message.get(key) or ""
            text = [{"type": "text", "text": content}] if isinstance(content, str) else content
            text = text if isinstance(text, list | tuple) else [text]
            message[key] = [*(self._new(name, {}) for _ in range(count)), *text]
            row[name] = [*talk[:place], message, *talk[place + 1 :]]
            if name in PROMPTS:
                return

    def _numbered(self, given: list[Any]) -> list[Any]:
        """Put the number of its image into each part, and return the images: those of the columns
        `given`, then those in parts, equal ones once."""
        values, known = [*given], {}
        empty = {
            name: [p for p in parts if p["image"] is None] for name, parts in self.parts.items()
        }
        empty = {name: parts for name, parts in empty.items() if parts}
        own = {
            name: [p for p in parts if p["image"] is not None] for name, parts in self.parts.items()
        }
        counts = {**{name: len(parts) for name, parts in empty.items()}, **self.texts}
        total = sum(counts.values())
        # Answers that repeat their prompt have its images again.
        repeated = total != len(given) and {*counts.values()} == {len(given)}
        if total != len(given) and not repeated:
            total = max(counts.values(), default=0) if len({*counts.values()}) == 1 else total
            raise BadImage(
                f"the row has {counted(total, 'placeholder')} for {counted(len(given), 'image')}; "
                f"correct the row, {DROP}"
            )
        number = 0
        for parts in empty.values():
            number = 0 if repeated else number
            for part in parts:
                part["image"] = number
                number += 1
        for part in (part for parts in own.values() for part in parts):
            value = part["image"]
            key = value if isinstance(value, str | bytes) else repr(value)
            if key not in known:
                known[key] = len(values)
                values.append(value)
            part["image"] = known[key]
        return values


def _given(row: dict[str, Any]) -> list[Any]:
    """Return the images in the columns of a row, which it loses."""
    columns = {name: row.pop(name) for name in ("image", "images") if name in row}
    filled = {name: value for name, value in columns.items() if value}
    if len(filled) > 1:
        raise RLHFError("the row has both `image` and `images`; remove one of the columns")
    (value,) = filled.values() or ([],)
    return [*value] if isinstance(value, list | tuple) else [value]


def _with_prompt(row: Columns) -> dict[str, Any]:
    """Return a row of Alpaca as a prompt with its completion: an image may be in the
    instruction."""
    ours = dict(row)
    if not has(row, "instruction") or has(row, "prompt") or row.get("history"):
        return ours
    texts = [ours.pop(name, None) for name in ("instruction", "input")]
    for name, text in zip(("instruction", "input"), texts, strict=True):
        if not isinstance(text, str | None):
            raise RLHFError(f"`{name}` must be text, not {type_name(text)}")
    ours["prompt"] = [{"role": "user", "content": "\n".join(filter(None, texts))}]
    if has(row, "output"):
        ours["completion"] = ours.pop("output")
    return ours


def decoded(value: Any) -> Any:
    """Return the messages that a text holds as JSON, as in CSV."""
    if isinstance(value, str) and value.lstrip().startswith("[{"):
        try:
            return json.loads(value)
        except ValueError:
            return value
    return value


def is_image(part: Any) -> bool:
    """Return whether a part of a message is an image."""
    if not isinstance(part, Mapping):
        return False
    return part.get("type") in PART_KINDS or (part.get("type") is None and bool(part.get("image")))


def _role(message: Any) -> str:
    known = message if isinstance(message, Mapping) else {}
    return str(known.get("role") or known.get("from")).strip().lower()
