"""The format `stepwise`: worked solutions with a label for each step, for process rewards.

What a trainer with `row_format = "stepwise"` gets in `example(row)`:

- `row.prompt`: the prompt's ids (BOS if the tokenizer adds one, a chat template's header).
- `row.answers`: one `Answer` with the ids of all steps and their marks. `trained` is all False,
  since no token is predicted, and there is no EOS.
- `row.columns["ends"]`: for each step the index of its last token in `row.answers[0].tokens`. That
  is the last token of its mark: the position whose hidden state judges the step.
- `row.columns["labels"]`: for each step a float from 0 (wrong) to 1 (right), nan if unknown.
- `label_per_token(row)`: the labels at their positions, nan elsewhere, for
  `Example(row.prompt, row.answers, values={"label": [label_per_token(row)]})`. Core then counts
  them (`Term(..., per="labels")`) and reports those that are cut off at `data.max_tokens`.

Two fields of the trainer's section, which may lack them, say how steps are marked:

- `separator: str` (a line break if the section has no such field) ends each step, also the last
  one. It is tokenised separately, so that all steps end with the same token.
- `placeholder: str | None`. If it is set, each step ends with it, tokenised together with its step,
  and the separator only comes between steps.

Rows:

- `{"prompt", "completions": [step, ...], "labels": [...]}`, the prompt text or messages.
- `{"prompt", "completion", "labels"}` or `{"text", "labels"}`: text with the placeholder in it
  after each step.
"""

import itertools
import math
from collections.abc import Sequence
from functools import partial
from typing import Any

from rlhf.errors import RLHFError, counted
from rlhf_plugin_prm.config import PRMConfig
from rlhf_rows import (
    Answer,
    Columns,
    Encoded,
    Reader,
    Rendered,
    Row,
    Unencoded,
    has,
    missing_columns,
    read_row,
    render_prompt,
    row_format,
    shown,
    type_name,
)


@row_format
def stepwise(row: Columns, reader: Reader) -> list[Unencoded]:
    """Read the rows that the module describes."""
    prompt = _prompt(row, reader)
    pieces, marks = _pieces(row, reader)
    # Every piece is a span, so it is tokenised by itself.
    bounds = list(itertools.accumulate(map(len, pieces), initial=len(prompt)))
    spans = tuple((start, end) for start, end in itertools.pairwise(bounds) if start < end)
    bos = not isinstance(row.get("prompt"), list)
    text = Rendered(prompt + "".join(pieces), spans, bos=bos)
    return [([text], partial(_row, row, spans, [bounds[mark + 1] for mark in marks]))]


def encode_steps(
    tokenizer: Any,
    prompt: str | Sequence[Any],
    steps: Sequence[str],
    config: PRMConfig,
) -> Row:
    """Return a prompt and its steps as token ids, encoded as in training: for scoring steps without
    labels."""
    columns = {"prompt": prompt, "completions": list(steps), "labels": [None] * len(steps)}
    (row,) = read_row(stepwise, columns, tokenizer, section=config, where="the prompt")
    return row


def label_per_token(row: Row) -> list[float]:
    """Return the labels of a row, each at the last token of its step, nan elsewhere."""
    values = [math.nan] * len(row.answers[0].tokens)
    for place, label in zip(row.columns["ends"], row.columns["labels"], strict=True):
        values[place] = label
    return values


def _pieces(row: Columns, reader: Reader) -> tuple[list[str], list[int]]:
    """Return the texts after the prompt that are tokenised separately, and which end a step."""
    separator = getattr(reader.section, "separator", "\n")
    placeholder = getattr(reader.section, "placeholder", None)
    if has(row, "completions", "labels"):
        steps = _steps(row)
        if placeholder:
            joined = separator.join(step + placeholder for step in steps)
            return _marked_text("completions", joined, placeholder)
        pieces = [piece for step in steps for piece in (step, separator)]
        return pieces, list(range(1, len(pieces), 2))
    for name in ("completion", "text"):
        if has(row, name, "labels"):
            return _marked_text(name, row[name], placeholder)
    raise missing_columns(row, "`prompt`, `completions` and `labels`")


def _prompt(row: Columns, reader: Reader) -> str:
    if not has(row, "prompt") and not has(row, "text"):
        raise missing_columns(row, "`prompt`, `completions` and `labels`")
    return render_prompt(row, reader)


def _steps(row: Columns) -> list[str]:
    steps = row["completions"]
    if not isinstance(steps, list):
        raise RLHFError(f"`completions` must be a list of steps, not {type_name(steps)}")
    for number, step in enumerate(steps):
        if not isinstance(step, str):
            raise RLHFError(f"step {number} of `completions` must be text, not {type_name(step)}")
    if not steps:
        raise RLHFError("`completions` has no steps; remove the row")
    return steps


def _marked_text(name: str, text: Any, placeholder: str | None) -> tuple[list[str], list[int]]:
    if not isinstance(text, str):
        raise RLHFError(f"`{name}` must be text, not {type_name(text)}")
    if not placeholder:
        raise RLHFError(
            f"`{name}` holds the steps as one text; set placeholder in the trainer's section to "
            "the text that ends each step"
        )
    *steps, rest = text.split(placeholder)
    if not steps:
        raise RLHFError(
            f"`{name}` does not contain the placeholder {placeholder!r}; set placeholder to the "
            "text that ends each step"
        )
    pieces = [step + placeholder for step in steps]
    return pieces + ([rest] if rest.strip() else []), list(range(len(steps)))


def _row(
    row: Columns, spans: Sequence[tuple[int, int]], marks: Sequence[int], texts: Sequence[Encoded]
) -> Row:
    """Return the row of its encoded text, in which steps end at the characters `marks`."""
    (text,) = texts
    labels = row["labels"]
    if not isinstance(labels, list):
        raise RLHFError(f"`labels` must be a list, not {type_name(labels)}")
    if len(labels) != len(marks):
        found = f"{counted(len(labels), 'label')} for {counted(len(marks), 'step')}"
        raise RLHFError(f"{found}; give one per step, null if unknown")
    size = text.trained[0][0] if text.trained else len(text.ids)
    bounds = {end: last for (_, end), (_, last) in zip(spans, text.trained, strict=True)}
    ends = [bounds.get(mark, size) - size - 1 for mark in marks]
    for number, (before, end) in enumerate(itertools.pairwise([-1, *ends])):
        if end == before:
            raise RLHFError(f"step {number} is empty; remove it and its label")
    numbers = [_label(number, label) for number, label in enumerate(labels)]
    tokens = text.ids[size:]
    columns = {**row, "ends": ends, "labels": numbers}
    return Row(text.ids[:size], [Answer(tokens, [False] * len(tokens))], columns)


def _label(number: int, label: Any) -> float:
    if label is None:
        return math.nan
    if isinstance(label, bool | int | float) and 0 <= label <= 1:
        return float(label)
    raise RLHFError(
        f"label {number} is {shown(label)}; use true, false, null or a number from 0 (wrong) to 1 "
        "(right)"
    )
