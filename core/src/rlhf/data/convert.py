"""Converters of published data sets into rows of our formats: what `convert` names in an entry of
`data.train` or `data.eval`."""

from collections.abc import Callable, Mapping
from typing import Any

from rlhf.data.columns import RawRow, errors_at, has, missing_columns
from rlhf.errors import RLHFError

RawColumns = Mapping[str, Any]

MARK = "\u043a\u0438"
"""What ends a step in Math-Shepherd: two Cyrillic letters."""
FIRST_STEP = "Step 1:"
ROLES = {
    "human": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "model": "assistant",
    "bard": "assistant",
    "function_call": "assistant",
    "observation": "tool",
}
"""Speakers in the rows of ShareGPT, and their roles."""


def converted(row: RawRow, name: str | None) -> list[RawRow]:
    """Return the rows that one row becomes. Raises RLHFError for a row of another shape."""
    if name is None:
        return [row]
    with errors_at(row.where):
        return [RawRow(row.where, columns) for columns in CONVERTERS[name](row)]


def prm800k(row: RawRow) -> list[RawColumns]:
    """Convert PRM800K (arXiv 2305.20050) to `stepwise` rows.

    The steps that were chosen (or written by the labeller) are one row. Every other completion is
    one more row, after the steps before it, whose labels are null there: each judgement counts
    once. A rating of -1 is wrong; 1 and 0 (neutral) are right, as in the paper's scores.
    """
    question, label = row.columns.get("question"), row.columns.get("label")
    if not isinstance(question, Mapping) or not isinstance(label, Mapping):
        raise missing_columns(row, "`question` and `label` for convert: prm800k")
    prompt = question["problem"] + "\n"
    steps: list[str] = []
    labels: list[float | None] = []
    out = []
    for step in label.get("steps") or []:
        completions, chosen = step.get("completions") or [], step.get("chosen_completion")
        for number, completion in enumerate(completions):
            if number != chosen:
                texts = [*steps, completion["text"]]
                marks = [*[None] * len(steps), _rating(completion)]
                out.append({"prompt": prompt, "completions": texts, "labels": marks})
        if chosen is not None:
            steps.append(completions[chosen]["text"])
            labels.append(_rating(completions[chosen]))
        elif step.get("human_completion"):
            steps.append(step["human_completion"]["text"])
            labels.append(1.0)
        else:
            break
    if steps:
        out.insert(0, {"prompt": prompt, "completions": steps, "labels": labels})
    return [row for row in out if any(mark is not None for mark in row["labels"])]


def math_shepherd(row: RawRow) -> list[RawColumns]:
    """Convert Math-Shepherd (arXiv 2312.08935) to `stepwise` rows: `input` has a mark after each
    step, and `label` is the same text with + or - for the marks."""
    text, judged = row.columns.get("input"), row.columns.get("label")
    if not isinstance(text, str) or not isinstance(judged, str):
        raise missing_columns(row, "`input` and `label` for convert: math_shepherd")
    *parts, _ = text.split(MARK)
    place = 0
    labels: list[bool] = []
    for part in parts:
        place += len(part)
        sign = judged[place : place + 1]
        if sign not in ("+", "-"):
            raise RLHFError(
                f"`label` has {sign!r} where `input` has mark {len(labels)}, not + or -; "
                "remove the row"
            )
        labels.append(sign == "+")
        place += 1
    first = parts[0].find(FIRST_STEP) if parts else -1
    if first < 0:
        raise RLHFError(f"`input` has no {FIRST_STEP!r} with a mark; remove the row")
    steps = [parts[0][first:], *parts[1:]]
    return [
        {
            "prompt": parts[0][:first].strip() + "\n",
            "completions": [step.strip() for step in steps],
            "labels": labels,
        }
    ]


def sharegpt(row: RawRow) -> list[RawColumns]:
    """Convert messages written as `from` and `value` to `role` and `content`.

    `conversations` becomes `prompt` beside `chosen` and `rejected` or `label` with `completion`,
    and `messages` by itself; `system` becomes its first message.
    """
    if not has(row, "conversations"):
        raise missing_columns(row, "`conversations` for convert: sharegpt")
    columns = dict(row.columns)
    messages = [_message(message) for message in columns.pop("conversations")]
    system = columns.pop("system", None)
    if system:
        messages.insert(0, {"role": "system", "content": system})
    for name in ("chosen", "rejected", "completion"):
        value = columns.get(name)
        if isinstance(value, Mapping):
            columns[name] = [_message(value)]
        elif isinstance(value, list):
            columns[name] = [_message(message) for message in value]
    answered = has(row, "chosen", "rejected") or has(row, "completion")
    return [{**columns, "prompt" if answered else "messages": messages}]


CONVERTERS: dict[str, Callable[[RawRow], list[RawColumns]]] = {
    "prm800k": prm800k,
    "math_shepherd": math_shepherd,
    "sharegpt": sharegpt,
}


def _rating(completion: Mapping[str, Any]) -> float | None:
    rating = completion.get("rating")
    return None if rating is None else float(rating >= 0)


def _message(message: Any) -> dict[str, Any]:
    if not isinstance(message, Mapping) or not {"from", "value"} <= set(message):
        raise RLHFError(
            f"convert: sharegpt takes messages with `from` and `value`, not {str(message)[:80]}"
        )
    speaker = message["from"]
    return {"role": ROLES.get(speaker, speaker), "content": message["value"]}
