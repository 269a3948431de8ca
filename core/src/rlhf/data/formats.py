"""The row formats by name: what users write in their files becomes token ids for a trainer."""

from collections.abc import Callable, Sequence

from rlhf.data.columns import RawRow, has, messages_of, missing_columns, read_each, type_name
from rlhf.data.encode import Rendered
from rlhf.data.preference import preferences, render_pair
from rlhf.data.stepwise import stepwise
from rlhf.data.tokens import (
    Reader,
    Row,
    Unencoded,
    encode_rows,
    render_answer,
    render_answers,
    render_conversation,
    render_text,
)
from rlhf.errors import RLHFError

Format = Callable[[Sequence[RawRow], Reader], list[list[Row]]]
"""`(raw rows, reader) -> the rows of each raw row`: none if there is nothing to train on, several
if a conversation had to be split or a pair became two rows."""


def demonstrations(raw: Sequence[RawRow], reader: Reader) -> list[list[Row]]:
    """Read `messages`, `text`, or `prompt` with `completion` (text or message lists), with
    `tools`."""
    rendered = read_each(raw, lambda row: _demonstration(row, reader))
    pairs = zip(raw, rendered, strict=True)
    return encode_rows([[([text], row.columns) for text in texts] for row, texts in pairs], reader)


def unpaired(raw: Sequence[RawRow], reader: Reader) -> list[list[Row]]:
    """Read `prompt`, `completion` and `label`, or `messages` and `label`; a pair becomes two
    rows. `columns["label"]` is a bool."""
    return encode_rows(read_each(raw, lambda row: _unpaired(row, reader)), reader)


FORMATS: dict[str, Format] = {
    "demonstration": demonstrations,
    "preference": preferences,
    "unpaired": unpaired,
    "stepwise": stepwise,
}


def format_of(name: str) -> Format:
    """Return the format that a trainer names in `row_format`."""
    if name not in FORMATS:
        raise RLHFError(f"unknown row format {name!r}; available: {', '.join(sorted(FORMATS))}")
    return FORMATS[name]


def _demonstration(row: RawRow, reader: Reader) -> list[Rendered]:
    """The texts of one row."""
    columns = row.columns
    if has(row, "messages"):
        return render_conversation(row, reader, messages_of(row, "messages"), first=0)
    if has(row, "prompt", "completion"):
        prompt, completion = columns["prompt"], columns["completion"]
        if isinstance(prompt, str) and isinstance(completion, str):
            return [render_text(prompt, completion)]
        before = messages_of(row, "prompt", role="user")
        after = messages_of(row, "completion", role="assistant")
        return render_conversation(row, reader, [*before, *after], first=len(before))
    if has(row, "text"):
        text = columns["text"]
        if not isinstance(text, str):
            raise RLHFError(f"`text` must be text, not {type_name(text)}")
        return [render_text("", text)] if text else []
    raise missing_columns(row, "`messages`, `text`, or `prompt` and `completion`")


def _unpaired(row: RawRow, reader: Reader) -> list[Unencoded]:
    if has(row, "chosen", "rejected"):
        return [
            ([path], {**row.columns, "label": label})
            for path, label in zip(render_pair(row, reader), (True, False), strict=False)
        ]
    if has(row, "prompt", "completion", "label"):
        paths = render_answers(row, reader, ["completion"], [row.columns["completion"]])
    elif has(row, "messages", "label"):
        messages = messages_of(row, "messages")
        last = max(0, len(messages) - 1)
        paths = [render_answer(row, reader, messages[:last], messages[last:], "messages")]
    else:
        raise missing_columns(
            row, "`prompt`, `completion` and `label`, or `prompt`, `chosen` and `rejected`"
        )
    return [(paths, {**row.columns, "label": _label(row)})]


def _label(row: RawRow) -> bool:
    label = row.columns["label"]
    if isinstance(label, bool | int | float) and label in (0, 1):
        return bool(label)
    shown = repr(label) if isinstance(label, str) else label
    raise RLHFError(f"`label` is {shown}; use true or false")
