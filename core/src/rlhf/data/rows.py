"""Rows as trainers get them: the border between core and the distributions of row formats."""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from attrs import field, frozen

from rlhf.config.field_docs import documented
from rlhf.data.columns import Columns
from rlhf.data.example import Answer
from rlhf.data.images import BadImage
from rlhf.errors import RLHFError
from rlhf.registry.imports import load_object, load_record
from rlhf.registry.installed import find


@documented
@frozen
class Row:
    """A prompt and its answers as token ids: what `example` gets for a row in a named format, and
    what `rlhf_rows.encode` returns."""

    prompt: list[int]
    """Token ids of the prompt; may be empty."""
    answers: list[Answer]
    """The answers; their `trained` says which tokens are trained on."""
    columns: Mapping[str, Any] = field(factory=dict)
    """The row as it was read, with the columns that its format adds."""
    images: Any = None
    """The `rlhf.formats.TreeImages` of a row with images; the format sets it."""


@documented
class RowReader(Protocol):
    """Reads rows in one format. Pickled for the processes that tokenise."""

    def read(
        self, rows: Sequence[tuple[str, Columns]], bad_images: dict[int, BadImage] | None = None
    ) -> list[list[Row]]:
        """Return what each of the `(place, columns)` becomes. Rows with bad images become nothing,
        and their errors are added to `bad_images` by the number of the row; without it they are
        raised. Raises RLHFError, which begins with the place, for a row that the format does not
        allow."""


@documented
class RowFormat(Protocol):
    """What the record of a row format names: `rlhf_rows.row_format` makes one of a function that
    reads one row."""

    def open(
        self, tokenizer: Any, *, whole: bool, section: Any, template: str, images: Any
    ) -> RowReader:
        """Return a reader for the tokenizer, its chat template and the trainer's own `section`.

        `whole` is `Trainer.renders_whole`. `template` is what errors call the chat template, empty
        for that of the tokenizer. `images.open(columns)` opens the images of a row with images as
        `rlhf_rows.RowImages`."""


def load_format(name: str) -> RowFormat:
    """Return the row format that a trainer names in `row_format`. Raises RLHFError without one."""
    if not isinstance(name, str):
        raise RLHFError(f"row_format is {name!r}; give the name of an installed row format")
    plugin = find("format", name)
    path = load_record(plugin).read
    made: RowFormat = load_object(path, plugin)
    if not hasattr(made, "open"):
        raise RLHFError(
            f"{plugin}: {path} is not a row format; decorate it with rlhf_rows.row_format"
        )
    return made
