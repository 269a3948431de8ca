"""Rows read in a format by its name, as core reads them."""

from collections.abc import Sequence
from typing import Any

from rlhf.data.rows import load_format
from rlhf_rows import Format, Reader, Row
from rlhf_rows.format import FormatReader

FORMATS = ("demonstration", "preference", "prompt", "unpaired")


def read_rows(
    name: str, rows: Sequence[tuple[str, dict[str, Any]]], reader: Reader
) -> list[list[Row]]:
    """What each of the `(place, columns)` becomes."""
    format = load_format(name)
    assert isinstance(format, Format)
    return FormatReader(format, reader).read(rows)
