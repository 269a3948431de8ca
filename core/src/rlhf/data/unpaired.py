"""The format `unpaired`: a prompt with one answer and whether it is good.

It gives one answer and `columns["label"]`, a bool. A row with `chosen` and `rejected` becomes two.
"""

from collections.abc import Sequence

from rlhf.data.preference import answer_paths, conversation_path, pair_paths
from rlhf.data.rows import Draft, RawRow, Reader, Row, encode_drafts, has, messages_of, refuse
from rlhf.errors import RLHFError


def unpaired(raw: Sequence[RawRow], reader: Reader) -> list[list[Row]]:
    """`prompt`, `completion` and `label`, or `messages` and `label`; a pair becomes two rows."""
    return encode_drafts([_unpaired(row, reader) for row in raw], reader)


def _unpaired(row: RawRow, reader: Reader) -> list[Draft]:
    if has(row, "chosen", "rejected"):
        paths = pair_paths(row, reader)
        return [
            ([path], {**row.columns, "label": label})
            for path, label in zip(paths, (True, False), strict=False)
        ]
    if has(row, "prompt", "completion", "label"):
        paths = answer_paths(row, reader, ["completion"], [row.columns["completion"]])
    elif has(row, "messages", "label"):
        messages = messages_of(row, "messages")
        last = max(0, len(messages) - 1)
        paths = [conversation_path(row, reader, messages[:last], messages[last:], "messages")]
    else:
        raise refuse(
            row, "`prompt`, `completion` and `label`, or `prompt`, `chosen` and `rejected`"
        )
    return [(paths, {**row.columns, "label": _label(row)})]


def _label(row: RawRow) -> bool:
    label = row.columns["label"]
    if isinstance(label, bool | int | float) and label in (0, 1):
        return bool(label)
    shown = repr(label) if isinstance(label, str) else label
    raise RLHFError(f"{row.where}: `label` is {shown}: a label is true or false")
