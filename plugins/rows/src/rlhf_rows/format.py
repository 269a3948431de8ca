"""A row format, made of a function that reads one row."""

import importlib
from collections.abc import Callable, Sequence
from operator import attrgetter
from typing import Any

from attrs import frozen

from rlhf.errors import RLHFError
from rlhf.formats import BadImage, Columns, Row, errors_at
from rlhf.plugin import documented
from rlhf_rows.images import open_images
from rlhf_rows.other_rows import with_our_columns
from rlhf_rows.tokens import Reader, Unencoded, encode_all

ReadRow = Callable[[Columns, Reader], list[Unencoded]]
"""`(row, reader) -> the rows it becomes`: none if there is nothing to train on, several if a
conversation had to be split or a pair became two rows."""


@documented
@frozen
class Format:
    """A row format as core opens it (`rlhf.formats.RowFormat`). Called, it is its function."""

    read_row: ReadRow
    """The function."""

    def __call__(self, row: Columns, reader: Reader) -> list[Unencoded]:
        return self.read_row(row, reader)

    def __reduce__(self) -> tuple[Any, ...]:
        # Under the name of the function, another process finds the format.
        return named, (self.read_row.__module__, self.read_row.__qualname__)

    def open(self, tokenizer: Any, **settings: Any) -> "FormatReader":
        """Return a reader of rows with a tokenizer; `settings` are those of `Reader`."""
        return FormatReader(self, Reader(tokenizer, **settings))


def row_format(read_row: ReadRow) -> Format:
    """Decorate the function of a row format, `read(row, reader)`: it returns the rows that a row of
    a file becomes, each as the texts of its paths and a function.

    The texts of many rows are tokenised at once. Then the function gets their token ids and returns
    a `Row`, which the trainer's `example` gets.
    """
    return Format(read_row)


@frozen(eq=False)
class FormatReader:
    """Reads rows in one format (`rlhf.formats.RowReader`)."""

    format: Format
    reader: Reader

    def read(
        self,
        rows: Sequence[tuple[str, Columns]],
        bad_images: dict[int, BadImage] | None = None,
    ) -> list[list[Row]]:
        """Return what each of the `(place, columns)` becomes."""
        unencoded = []
        for number, (where, row) in enumerate(rows):
            parts: list[Unencoded] = []
            with errors_at(where):
                try:
                    images = open_images(self.reader.images, row)
                    ours = with_our_columns(images.row if images else row)
                    parts = checked(self.format(ours, self.reader), self.format.read_row)
                    parts = list(map(images.expand, parts)) if images else parts
                except BadImage as error:
                    if bad_images is None:
                        raise
                    bad_images[number], parts = error, []
            unencoded.append((where, parts))
        return encode_all(unencoded, self.reader)


def checked(parts: Any, read_row: Callable[..., Any]) -> list[Unencoded]:
    """Return what the function of a format returned. Raises RLHFError for another shape."""
    shaped = isinstance(parts, list) and all(
        isinstance(part, tuple)
        and len(part) == 2
        and isinstance(part[0], list)
        and callable(part[1])
        for part in parts
    )
    if shaped:
        return parts
    name = f"{read_row.__module__}.{read_row.__qualname__}"
    raise RLHFError(
        f"{name} returned {type(parts).__name__}; return a list of pairs (texts, function), such "
        "as [(render_answers(...), partial(join_paths, row))]"
    )


def named(module: str, name: str) -> Any:
    """Return what has this name in a module."""
    return attrgetter(name)(importlib.import_module(module))
