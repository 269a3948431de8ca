"""The format `preference`: a prompt with answers of which some are better.

It gives `Row(prompt, answers, columns)`: of a pair the answers are (chosen, rejected), of a K-wise
row all answers in the row's order. `columns["ranks"]` holds one float per answer, 1 for the best,
whatever the row gave (a pair has 1 and 2; equal scores have equal ranks); `columns["scores"]` and
`columns["margin"]` are floats where the row has them.
"""

import math
from collections.abc import Sequence
from typing import Any

from rlhf.data.rows import (
    Draft,
    Path,
    RawRow,
    Reader,
    Row,
    as_messages,
    conversations,
    encode_drafts,
    has,
    kind,
    messages_of,
    refuse,
    text_path,
)
from rlhf.errors import RLHFError

SPEAKER = "\n\nAssistant:"
"""What stands before an answer in the rows of hh-rlhf."""


def preferences(raw: Sequence[RawRow], reader: Reader) -> list[list[Row]]:
    """`chosen` and `rejected` with or without `prompt`, or `prompt`, `answers` and `ranks` or
    `scores`; text or message lists. Equal answers, or all of one rank, give no row."""
    drafts = [_preference(row, reader) for row in raw]
    return encode_drafts([[draft] for draft in drafts], reader)


def _preference(row: RawRow, reader: Reader) -> Draft:
    if has(row, "chosen", "rejected"):
        return pair_paths(row, reader), {**row.columns, **_margin(row), "ranks": [1.0, 2.0]}
    if has(row, "prompt", "answers"):
        return _ranked(row, reader)
    raise refuse(
        row, "`chosen` and `rejected`, with or without `prompt`, or `prompt`, `answers` and `ranks`"
    )


def pair_paths(row: RawRow, reader: Reader) -> list[Path]:
    """The paths of the chosen and the rejected answer; none if they are equal."""
    values = [row.columns["chosen"], row.columns["rejected"]]
    prompt = row.columns.get("prompt")
    if values[0] == values[1]:
        return []
    if all(isinstance(value, str) for value in values):
        if prompt is None:
            cut = _shared_text(*values)
            return [text_path(value[:cut], value[cut:]) for value in values]
        return answer_paths(row, reader, ["chosen", "rejected"], values)
    lists = [messages_of(row, name, role="assistant") for name in ("chosen", "rejected")]
    size = _shared_messages(*lists)
    shared, answers = lists[0][:size], [messages[size:] for messages in lists]
    before = _before(row, shared)
    return [
        conversation_path(row, reader, before, answer, name)
        for answer, name in zip(answers, ("chosen", "rejected"), strict=True)
    ]


def _before(row: RawRow, shared: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The messages before the answers: the prompt, unless what the answers share repeats it."""
    if not has(row, "prompt"):
        return shared
    prompt = messages_of(row, "prompt", role="user")
    if isinstance(row.columns["prompt"], str):
        text = row.columns["prompt"].strip()
        contents = [m["content"] for m in shared if isinstance(m.get("content"), str)]
        return shared if text in [content.strip() for content in contents] else prompt + shared
    return shared if shared[: len(prompt)] == prompt else prompt + shared


def _ranked(row: RawRow, reader: Reader) -> Draft:
    """A prompt with several answers and how good they are."""
    answers = row.columns["answers"]
    if not isinstance(answers, list):
        raise RLHFError(f"{row.where}: `answers` must be a list, not {kind(answers)}")
    if len(answers) < 2:
        raise RLHFError(
            f"{row.where}: `answers` has {len(answers)}: there must be two to compare, so leave "
            "the row out"
        )
    given = next((name for name in ("ranks", "scores") if has(row, name)), None)
    if given is None:
        raise refuse(row, "`ranks` or `scores` beside `answers`")
    values = row.columns[given]
    if not isinstance(values, list) or len(values) != len(answers):
        count = len(values) if isinstance(values, list) else kind(values)
        raise RLHFError(
            f"{row.where}: {count} {given} for {len(answers)} answers: give each answer one"
        )
    numbers = _numbers(row, given, values)
    ranks = numbers if given == "ranks" else _ranks(numbers)
    if len(set(ranks)) == 1:
        return [], row.columns
    paths = answer_paths(row, reader, [f"answers[{n}]" for n in range(len(answers))], answers)
    return paths, {**row.columns, **_margin(row), given: numbers, "ranks": ranks}


def _ranks(scores: Sequence[float]) -> list[float]:
    """1 for the highest score, equal for equal ones."""
    order = sorted(set(scores), reverse=True)
    return [1.0 + order.index(score) for score in scores]


def answer_paths(
    row: RawRow, reader: Reader, names: Sequence[str], values: Sequence[Any]
) -> list[Path]:
    """The paths of the row's prompt with each of the values, text or message lists."""
    prompt = row.columns["prompt"]
    if isinstance(prompt, str) and all(isinstance(value, str) for value in values):
        return [text_path(prompt, value) for value in values]
    before = messages_of(row, "prompt", role="user")
    return [
        conversation_path(
            row, reader, before, as_messages(row, name, value, role="assistant"), name
        )
        for name, value in zip(names, values, strict=True)
    ]


def conversation_path(
    row: RawRow,
    reader: Reader,
    before: list[dict[str, Any]],
    answer: list[dict[str, Any]],
    name: str,
) -> Path:
    """An answer after its prompt. Where the template renders earlier turns of the answer otherwise,
    its last turn is trained on."""
    paths = conversations(row, reader, [*before, *answer], first=len(before))
    if not paths:
        raise RLHFError(
            f"{row.where}: `{name}` has no turn of the assistant after the prompt: "
            "let it end with one"
        )
    return paths[-1]


def _margin(row: RawRow) -> dict[str, float]:
    """The row's `margin` as a number, where it has one."""
    if not has(row, "margin"):
        return {}
    return {"margin": _numbers(row, "margin", [row.columns["margin"]])[0]}


def _numbers(row: RawRow, name: str, values: Sequence[Any]) -> list[float]:
    for value in values:
        number = isinstance(value, int | float) and not isinstance(value, bool)
        if not number or not math.isfinite(value):
            shown = value if number else kind(value)
            raise RLHFError(f"{row.where}: `{name}` must hold numbers, not {shown}")
    return [float(value) for value in values]


def _shared_messages(one: Sequence[Any], other: Sequence[Any]) -> int:
    """How many messages both lists begin with."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((n for n, (a, b) in pairs if a != b), min(len(one), len(other)))


def _shared_text(one: str, other: str) -> int:
    """Where the answers of two texts begin: after the last speaker's name that both share, else
    before the word (and its blank) or after the line break that stands last before the first
    difference."""
    shortest = min(len(one), len(other))
    size = next((n for n in range(shortest) if one[n] != other[n]), shortest)
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
