"""The row formats by name: what users write in their files becomes token ids for a trainer."""

from collections.abc import Callable, Sequence
from functools import partial

from rlhf.data.columns import Columns, errors_at, has, missing_columns, shown, type_name
from rlhf.data.encode import Rendered
from rlhf.data.messages import as_messages
from rlhf.data.other_rows import with_our_columns
from rlhf.data.preference import preferences, render_pair
from rlhf.data.prompts import split_prompt
from rlhf.data.tokens import (
    Reader,
    Row,
    Unencoded,
    encode_all,
    join_paths,
    raise_if_role_is_unknown,
    render_answer,
    render_answers,
    render_conversation,
    render_text,
)
from rlhf.errors import RLHFError
from rlhf.registry.imports import load_object, load_record
from rlhf.registry.installed import find

Format = Callable[[Columns, Reader], list[Unencoded]]
"""`(row, reader) -> the rows it becomes`: none if there is nothing to train on, several if a
conversation had to be split or a pair became two rows."""


def demonstrations(row: Columns, reader: Reader) -> list[Unencoded]:
    """Read `messages`, `text`, or `prompt` with `completion` (text or message lists), with
    `tools`."""
    return [([text], partial(join_paths, row)) for text in _demonstration(row, reader)]


def unpaired(row: Columns, reader: Reader) -> list[Unencoded]:
    """Read `prompt`, `completion` and `label`, or `messages` and `label`; a pair becomes two
    rows. `columns["label"]` is a bool."""
    if has(row, "chosen", "rejected"):
        return [
            ([path], partial(join_paths, {**row, "label": label}))
            for path, label in zip(render_pair(row, reader), (True, False), strict=False)
        ]
    if has(row, "prompt", "completion", "label"):
        paths = render_answers(row, reader, ["completion"], [row["completion"]])
    elif has(row, "messages", "label"):
        messages = as_messages("messages", row["messages"])
        last = max(0, len(messages) - 1)
        paths = [render_answer(row, reader, messages[:last], messages[last:], "messages")]
    else:
        raise missing_columns(
            row, "`prompt`, `completion` and `label`, or `prompt`, `chosen` and `rejected`"
        )
    return [(paths, partial(join_paths, {**row, "label": _label(row)}))]


FORMATS: dict[str, Format] = {
    "demonstration": demonstrations,
    "preference": preferences,
    "unpaired": unpaired,
}
"""Core's own formats; others are found as plugins."""


def find_format(name: str) -> Format:
    """Return the function that reads rows of the format that a trainer names in `row_format`."""
    if name in FORMATS:
        return FORMATS[name]
    plugin = find("format", name)
    read: Format = load_object(load_record(plugin).read, plugin)
    return read


def read_rows(format: str, rows: Sequence[tuple[str, Columns]], reader: Reader) -> list[list[Row]]:
    """Return what each of the `(place, row)` becomes in a format. Raises RLHFError for a row that
    the format does not allow, with its place."""
    read, unencoded = find_format(format), []
    for where, row in rows:
        with errors_at(where):
            unencoded.append((where, read(with_our_columns(row), reader)))
    return encode_all(unencoded, reader)


def _demonstration(row: Columns, reader: Reader) -> list[Rendered]:
    if has(row, "messages"):
        messages = as_messages("messages", row["messages"])
        raise_if_role_is_unknown("messages", messages)
        return render_conversation(row, reader, messages, first=0)
    if has(row, "prompt", "completion"):
        prompt, completion = row["prompt"], row["completion"]
        if isinstance(prompt, str) and isinstance(completion, str):
            return [render_text(prompt, completion)]
        talk = as_messages("completion", completion, role="assistant")
        asked = as_messages("prompt", prompt, role="user")
        before, (after,) = split_prompt(asked, [talk], ["completion"])
        raise_if_role_is_unknown("completion", after)
        return render_conversation(row, reader, [*before, *after], first=len(before))
    if has(row, "text"):
        text = row["text"]
        if not isinstance(text, str):
            raise RLHFError(f"`text` must be text, not {type_name(text)}")
        return [render_text("", text)] if text else []
    raise missing_columns(row, "`messages`, `text`, or `prompt` and `completion`")


def _label(row: Columns) -> bool:
    label = row["label"]
    if isinstance(label, bool | int | float) and label in (0, 1):
        return bool(label)
    raise RLHFError(f"`label` is {shown(label)}; use true or false")
