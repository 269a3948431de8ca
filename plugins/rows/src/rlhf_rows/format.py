"""A row format, made of a function that reads one row."""

from collections.abc import Callable, Sequence
from typing import Any

from attrs import frozen

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

    def open(self, tokenizer: Any, **settings: Any) -> "FormatReader":
        """Return a reader of rows with a tokenizer; `settings` are those of `Reader`."""
        return FormatReader(self.read_row, Reader(tokenizer, **settings))


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

    read_row: ReadRow
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
                    parts = self.read_row(ours, self.reader)
                    parts = list(map(images.expand, parts)) if images else parts
                except BadImage as error:
                    if bad_images is None:
                        raise
                    bad_images[number], parts = error, []
            unencoded.append((where, parts))
        return encode_all(unencoded, self.reader)
