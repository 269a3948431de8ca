"""The format `unpaired`: a prompt with one answer and whether it is good.

It returns one answer and `columns["label"]`, a bool. A row with `chosen` and `rejected` becomes
two rows.
"""

from collections.abc import Sequence

from rlhf.data.columns import RawRow, has, messages_of, missing_columns, read_each
from rlhf.data.preference import render_pair
from rlhf.data.tokens import Reader, Row, Unencoded, encode_rows, render_answer, render_answers
from rlhf.errors import RLHFError


def unpaired(raw: Sequence[RawRow], reader: Reader) -> list[list[Row]]:
    """Read `prompt`, `completion` and `label`, or `messages` and `label`; a pair becomes two
    rows."""
    return encode_rows(read_each(raw, lambda row: _unpaired(row, reader)), reader)


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
