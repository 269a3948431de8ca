"""The row formats: what users write in their files becomes token ids that a trainer can use as they
are."""

from collections.abc import Callable, Sequence

from rlhf.data.encode import Marked
from rlhf.data.preference import preferences
from rlhf.data.rows import (
    Path,
    RawRow,
    Reader,
    Row,
    conversations,
    encode_paths,
    has,
    kind,
    messages_of,
    refuse,
    row_of_paths,
    text_path,
)
from rlhf.data.stepwise import label_per_token, stepwise
from rlhf.data.unpaired import unpaired
from rlhf.errors import RLHFError

__all__ = [
    "FORMATS",
    "Format",
    "RawRow",
    "Reader",
    "Row",
    "demonstrations",
    "format_of",
    "label_per_token",
    "preferences",
    "stepwise",
    "unpaired",
]

Format = Callable[[Sequence[RawRow], Reader], list[list[Row]]]
"""`(raw rows, reader) -> for each raw row its rows`: none if there is nothing to train on, several
if a conversation had to be split or a pair was taken apart."""


def demonstrations(raw: Sequence[RawRow], reader: Reader) -> list[list[Row]]:
    """`messages`, `text`, or `prompt` with `completion` (text or message lists), with `tools`."""
    found = [_demonstration(row, reader) for row in raw]
    encoded = iter(encode_paths([path for paths in found for path in paths], reader))
    return [
        [row_of_paths([next(encoded)], row.columns) for _ in paths]
        for row, paths in zip(raw, found, strict=True)
    ]


FORMATS: dict[str, Format] = {
    "demonstration": demonstrations,
    "preference": preferences,
    "unpaired": unpaired,
    "stepwise": stepwise,
}


def format_of(name: str) -> Format:
    """The format that a trainer names in `rows`."""
    if name not in FORMATS:
        raise RLHFError(f"there is no row format {name!r}: there are {', '.join(sorted(FORMATS))}")
    return FORMATS[name]


def _demonstration(row: RawRow, reader: Reader) -> list[Path]:
    """The texts of one row."""
    columns = row.columns
    if has(row, "messages"):
        return conversations(row, reader, messages_of(row, "messages"), first=0)
    if has(row, "prompt", "completion"):
        prompt, completion = columns["prompt"], columns["completion"]
        if isinstance(prompt, str) and isinstance(completion, str):
            return [text_path(prompt, completion)]
        before = messages_of(row, "prompt", role="user")
        after = messages_of(row, "completion", role="assistant")
        return conversations(row, reader, [*before, *after], first=len(before))
    if has(row, "text"):
        text = columns["text"]
        if not isinstance(text, str):
            raise RLHFError(f"{row.where}: `text` must be text, not {kind(text)}")
        return [Path(Marked(text, ((0, len(text)),)), bare=True)] if text else []
    raise refuse(row, "`messages`, `text`, or `prompt` and `completion`")
