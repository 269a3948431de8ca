"""A row as it was read, and errors that name its place."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from rlhf.errors import Place, RLHFError

Columns = Mapping[str, Any]
"""A row as it was read."""


class MissingColumn(RLHFError, KeyError):
    """A column that a trainer reads and the row does not have; also a KeyError, which a trainer may
    expect."""

    __str__ = Exception.__str__


class OwnRow(dict[str, Any]):
    """A row of a trainer's own format, which names the columns it has if one is missing."""

    def __missing__(self, name: str) -> Any:
        raise MissingColumn(str(missing_columns(self, f"`{name}`")))


@contextmanager
def errors_at(where: str, call: str = "reading a row") -> Iterator[None]:
    """Put `where` before an RLHFError of this block, and note on any other error that `call`, such
    as a trainer's method, failed there."""
    try:
        yield
    except RLHFError as error:
        raise RLHFError(f"{where}: {error}") from error
    except Exception as error:
        error.add_note(Place(f"{call} failed with {where}"))
        raise


def missing_columns(row: Columns, needs: str) -> RLHFError:
    """Return the error for a row without the columns of its format."""
    names = [f"`{name}`" for name, value in row.items() if value is not None]
    return RLHFError(
        f"a row needs {needs}, but this one has {', '.join(names) or 'nothing'}; "
        "rename columns with `columns` in data"
    )
