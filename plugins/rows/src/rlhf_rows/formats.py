"""The row formats of text and conversations: demonstrations, preferences, unpaired answers and
prompts."""

import math
import sys
from collections.abc import Sequence
from functools import partial
from typing import Any

from rlhf.errors import RLHFError, counted
from rlhf.formats import Columns, Row, missing_columns
from rlhf_rows.columns import has, shown, type_name
from rlhf_rows.encoder import Rendered, common_prefix
from rlhf_rows.format import row_format
from rlhf_rows.messages import as_messages
from rlhf_rows.prompts import shared_size, split_prompt
from rlhf_rows.tokens import (
    Reader,
    Unencoded,
    join_paths,
    raise_if_role_is_unknown,
    render_answer,
    render_answers,
    render_conversation,
    render_prompt,
    render_text,
)

SPEAKER = "\n\nAssistant:"
"""What precedes an answer in the rows of hh-rlhf."""


@row_format
def preferences(row: Columns, reader: Reader) -> list[Unencoded]:
    """Read `chosen` and `rejected` with or without `prompt`, or `prompt`, `answers` and `ranks` or
    `scores`; text or message lists. Equal answers, or all of one rank, make no row."""
    if has(row, "chosen", "rejected"):
        paths = render_pair(row, reader)
        ranked = partial(join_paths, {**row, **_margin(row), "ranks": [1.0, 2.0]})
        return [(paths, ranked)] if paths else []
    if has(row, "prompt", "answers"):
        return _ranked(row, reader)
    raise missing_columns(
        row, "`chosen` and `rejected`, with or without `prompt`, or `prompt`, `answers` and `ranks`"
    )


def render_pair(row: Columns, reader: Reader) -> list[Rendered]:
    """Return the paths of the chosen and the rejected answer; none if they are equal."""
    names = ["chosen", "rejected"]
    values = [row[name] for name in names]
    if values[0] == values[1]:
        return []
    if all(isinstance(value, str) for value in values):
        if row.get("prompt") is None:
            cut = _shared_text(*values)
            return [render_text(value[:cut], value[cut:]) for value in values]
        return render_answers(row, reader, names, values)
    lists = [as_messages(name, row[name], role="assistant") for name in names]
    prompt = as_messages("prompt", row["prompt"], role="user") if has(row, "prompt") else []
    before, (chosen, rejected) = split_prompt(prompt, lists, names)
    size = shared_size(chosen, rejected)
    before += chosen[:size]
    return [
        render_answer(row, reader, before, messages[size:], name)
        for name, messages in zip(names, (chosen, rejected), strict=True)
    ]


def _ranked(row: Columns, reader: Reader) -> list[Unencoded]:
    """Read a prompt with several answers and their ranks or scores."""
    answers = row["answers"]
    if not isinstance(answers, list):
        raise RLHFError(f"`answers` must be a list, not {type_name(answers)}")
    if len(answers) < 2:
        raise RLHFError(f"`answers` has {len(answers)}, but needs at least 2; remove the row")
    column = next((name for name in ("ranks", "scores") if has(row, name)), None)
    if column is None:
        raise missing_columns(row, "`ranks` or `scores` with `answers`")
    values = row[column]
    if not isinstance(values, list) or len(values) != len(answers):
        found = f"{type_name(values)} {column}"
        if isinstance(values, list):
            found = counted(len(values), column.removesuffix("s"))
        raise RLHFError(f"{found} for {len(answers)} answers; give one per answer")
    numbers = _numbers(column, values)
    # The highest score has rank 1, and equal scores have equal ranks.
    order = sorted(set(numbers), reverse=True)
    ranks = numbers if column == "ranks" else [1.0 + order.index(score) for score in numbers]
    if len(set(ranks)) == 1:
        return []
    names = [f"answers[{number}]" for number in range(len(answers))]
    paths = render_answers(row, reader, names, answers)
    columns = {**row, **_margin(row), column: numbers, "ranks": ranks}
    return [(paths, partial(join_paths, columns))]


def _margin(row: Columns) -> dict[str, float]:
    """Return the row's `margin` as a number, if it has one."""
    return {"margin": _numbers("margin", [row["margin"]])[0]} if has(row, "margin") else {}


def _numbers(name: str, values: Sequence[Any]) -> list[float]:
    """Return the values as floats. Raises RLHFError for one that is not a finite number."""
    for value in values:
        number = isinstance(value, int | float) and not isinstance(value, bool)
        if isinstance(value, int) and abs(value) > sys.float_info.max:
            raise RLHFError(f"`{name}` must hold numbers up to 1.8e308, not larger ones")
        if not number or not math.isfinite(value):
            shown = value if number else type_name(value)
            raise RLHFError(f"`{name}` must hold numbers, not {shown}")
    return [float(value) for value in values]


def _shared_text(one: str, other: str) -> int:
    """Return where the answers of two texts begin: after the last speaker's name that both share,
    else at the last word (with its blank) or line break before the first difference."""
    size = len(common_prefix([one, other]))
    speaker = one.rfind(SPEAKER, 0, size)
    if speaker >= 0:
        return speaker + len(SPEAKER)
    for place in range(size, 0, -1):
        before = one[place - 1]
        if before.isspace() and before != " ":
            return place
        if one[place : place + 1].isspace() and other[place : place + 1].isspace():
            return place
    return 0


@row_format
def demonstrations(row: Columns, reader: Reader) -> list[Unencoded]:
    """Read `messages`, `text`, or `prompt` with `completion` (text or message lists), with
    `tools`."""
    return [([text], partial(join_paths, row)) for text in _demonstration(row, reader)]


@row_format
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


@row_format
def prompts(row: Columns, reader: Reader) -> list[Unencoded]:
    """Read `prompt`, text or messages, with `tools`: what the model is to answer. The row has no
    answers."""
    if not has(row, "prompt"):
        raise missing_columns(row, "`prompt`")
    is_text = isinstance(row["prompt"], str)
    path = Rendered(render_prompt(row, reader), (), bos=is_text)
    return [([path], lambda paths: Row(paths[0].ids, [], row))]


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
