"""The format `stepwise`: worked solutions with a label for each step, for process rewards.

What a trainer with `rows = "stepwise"` gets in `example(row)`:

- `row.prompt`: the prompt's ids (BOS if the tokenizer adds one, a chat template's header).
- `row.answers`: one `Answer` with the ids of all steps and their marks, nothing of it trained on
  (`trained` is all False, since no token is predicted; there is no EOS).
- `row.columns["ends"]`: for each step the index of its last token in `row.answers[0].tokens`, that
  is, the last token of its mark: the position whose hidden state judges the step.
- `row.columns["labels"]`: for each step a float from 0 (wrong) to 1 (right), nan where none is
  known; bool, int 0 or 1 and float (soft) labels all come as floats.
- `label_per_token(row)`: the labels at their places, nan elsewhere, for
  `Example(row.prompt, row.answers, values={"label": [label_per_token(row)]})`. Core then counts
  them (`Term(..., per="labels")`) and reports those that are cut off at `data.max_tokens`.

The trainer's section says how steps are marked, by two fields that this format reads:

- `separator: str` (a line break if the section has none) ends each step, the last one too, and is
  tokenised by itself, so that all steps end with the very same token.
- `placeholder: str | None` (None if the section has none). Where it is given, a step ends with it,
  tokenised together with its step, and the separator only stands between steps.

Rows:

- `{"prompt", "completions": [step, ...], "labels": [...]}`, the prompt text or messages.
- `{"prompt", "completion", "labels"}` or `{"text", "labels"}`: text with the placeholder already in
  it, after each step.
"""

import itertools
import math
from collections.abc import Sequence
from typing import Any

from rlhf.data.example import Answer
from rlhf.data.rows import (
    RawRow,
    Reader,
    Row,
    as_messages,
    check_template,
    has,
    keywords_of,
    kind,
    refuse,
    tools_of,
)
from rlhf.errors import RLHFError


def stepwise(raw: Sequence[RawRow], reader: Reader) -> list[list[Row]]:
    """The rows of this format as the file's docstring tells."""
    texts, marks = [], []
    for row in raw:
        prompt, pieces, ends = _pieces(row, reader)
        texts.append([prompt, *pieces])
        marks.append(ends)
    plain = [not isinstance(row.columns.get("prompt"), list) for row in raw]
    encoded = reader.encoder.encode_stretches(texts, plain)
    return [
        [_row(row, pieces, ends)] for row, pieces, ends in zip(raw, encoded, marks, strict=True)
    ]


def label_per_token(row: Row) -> list[float]:
    """The labels of a row of this format, each at the last token of its step, nan elsewhere."""
    values = [math.nan] * len(row.answers[0].tokens)
    for place, label in zip(row.columns["ends"], row.columns["labels"], strict=True):
        values[place] = label
    return values


def _pieces(row: RawRow, reader: Reader) -> tuple[str, list[str], list[int]]:
    """The prompt's text, the texts that are tokenised one by one, and which of them end a step."""
    columns = row.columns
    prompt = _prompt(row, reader)
    if has(row, "completions", "labels"):
        steps = _steps(row)
        if reader.placeholder:
            joined = reader.separator.join(step + reader.placeholder for step in steps)
            return prompt, *_marked_text(row, "completions", joined, reader.placeholder)
        pieces = [piece for step in steps for piece in (step, reader.separator)]
        return prompt, pieces, list(range(1, len(pieces), 2))
    for name in ("completion", "text"):
        if has(row, name, "labels"):
            return prompt, *_marked_text(row, name, columns[name], reader.placeholder)
    raise refuse(row, "`prompt`, `completions` and `labels`")


def _prompt(row: RawRow, reader: Reader) -> str:
    value = row.columns.get("prompt")
    if value is None and not has(row, "text"):
        raise refuse(row, "`prompt`, `completions` and `labels`")
    if value is None or isinstance(value, str):
        return value or ""
    messages = as_messages(row, "prompt", value)
    check_template(row, reader)
    try:
        return reader.chat.view(tools_of(row), keywords_of(row)).text(messages, opened=True)
    except RLHFError as error:
        raise RLHFError(f"{row.where}: {error}") from None


def _steps(row: RawRow) -> list[str]:
    steps = row.columns["completions"]
    if not isinstance(steps, list):
        raise RLHFError(f"{row.where}: `completions` must be a list of steps, not {kind(steps)}")
    for number, step in enumerate(steps):
        if not isinstance(step, str):
            raise RLHFError(
                f"{row.where}: step {number} of `completions` must be text, not {kind(step)}"
            )
    if not steps:
        raise RLHFError(f"{row.where}: `completions` has no step: leave the row out")
    return steps


def _marked_text(
    row: RawRow, name: str, text: Any, placeholder: str | None
) -> tuple[list[str], list[int]]:
    if not isinstance(text, str):
        raise RLHFError(f"{row.where}: `{name}` must be text, not {kind(text)}")
    if not placeholder:
        raise RLHFError(
            f"{row.where}: the steps stand in `{name}`: set placeholder in the trainer's section "
            "to the text that ends each of them"
        )
    *steps, rest = text.split(placeholder)
    if not steps:
        raise RLHFError(
            f"{row.where}: `{name}` has no step that ends with the placeholder {placeholder!r}: "
            "set placeholder to what stands there"
        )
    pieces = [step + placeholder for step in steps]
    return pieces + ([rest] if rest.strip() else []), list(range(len(steps)))


def _row(row: RawRow, pieces: Sequence[list[int]], marks: Sequence[int]) -> Row:
    prompt, *rest = pieces
    labels = row.columns["labels"]
    if not isinstance(labels, list):
        raise RLHFError(f"{row.where}: `labels` must be a list, not {kind(labels)}")
    if len(labels) != len(marks):
        raise RLHFError(
            f"{row.where}: {len(labels)} labels for {len(marks)} steps: give each step one, null "
            "where it is not known"
        )
    tokens, bounds = [], []
    for piece in rest:
        tokens += piece
        bounds.append(len(tokens) - 1)
    ends = [bounds[mark] for mark in marks]
    for number, (before, end) in enumerate(itertools.pairwise([-1, *ends])):
        if end == before:
            raise RLHFError(f"{row.where}: step {number} is empty: leave it out with its label")
    numbers = [_label(row, number, label) for number, label in enumerate(labels)]
    columns = {**row.columns, "ends": ends, "labels": numbers}
    return Row(prompt, [Answer(tokens, [False] * len(tokens))], columns)


def _label(row: RawRow, number: int, label: Any) -> float:
    if label is None:
        return math.nan
    if isinstance(label, bool | int | float) and 0 <= label <= 1:
        return float(label)
    shown = repr(label) if isinstance(label, str) else label
    raise RLHFError(
        f"{row.where}: label {number} is {shown}: a label is true or false, or a number from 0 "
        "(wrong) to 1 (right)"
    )
