"""The types of files that hold rows: JSON, CSV, Parquet and Arrow. A file is read in pieces, since
it may be larger than memory."""

import codecs
import contextlib
import csv
import gzip
import json
import sys
import zlib
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from itertools import chain, islice, repeat, zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from rlhf.errors import RLHFError, counted, first_line

if TYPE_CHECKING:
    import datasets

TEXT = "json text"
"""The column that holds a row of JSON as text. Arrow's own JSON reader would give every row the
keys of all the others (with null), which breaks tools and their arguments."""
PLACE = "place in the entry"
"""The column with the end of a row's name, such as ` line 3` or `/part.csv row 0`."""
CHUNK = 1000
"""Rows of a piece."""
BUFFER = 2**20
"""Bytes that are read at once of a column of a Parquet file."""
WHITE = b" \t\r\n"
END = "\0 end of the file"
"""A line that is added to a CSV file; only a quote that is not closed takes it for text."""
Pieces = Iterator[tuple[Iterable[int], pa.StructArray]]
"""Rows as mappings, with the line of each in its file from 1, or 0 if rows have no line."""


def suffix_of(name: str) -> str:
    """Return the end of a file's name that says its type, in lower case."""
    path = Path(name.lower())
    return Path(path.stem).suffix + path.suffix if path.suffix == ".gz" else path.suffix


def read_files(
    files: Mapping[str, Path], scratch: Path, setting: str
) -> tuple["datasets.Dataset", list[int]]:
    """Return the rows of files, in order, mapped from a file in the folder `scratch`, and how many
    rows each file has.

    `files` is by what the column `PLACE` begins with. There is a further column for each type of
    file and each set of columns in them, whose values are whole rows, and null in the rows of other
    files: a name may have text in one file and a list in another. It is called by a number and the
    suffix. Raises RLHFError for a file of `setting` that cannot be read.
    """
    from datasets import Dataset

    opened = {name: _open(path, setting) for name, path in files.items()}
    kinds = list(dict.fromkeys(kind for kind, _ in opened.values() if kind[1].num_fields))
    columns = [(f"{number} {suffix}", rows) for number, (suffix, rows) in enumerate(kinds)]
    schema = pa.schema([(PLACE, pa.string()), *columns])
    counts = []
    target = str(scratch / "rows.arrow")
    with pa.OSFile(target, "wb") as sink, pa.ipc.new_stream(sink, schema) as writer:
        for name, (kind, pieces) in opened.items():
            count = 0
            for lines, rows in pieces:
                places = [
                    f"{name} line {line}" if line else f"{name} row {number}"
                    for number, line in zip(range(count, count + len(rows)), lines, strict=False)
                ]
                values = [rows if each == kind else pa.nulls(len(rows), each[1]) for each in kinds]
                arrays = [pa.array(places, pa.string()), *values]
                writer.write_batch(pa.record_batch(arrays, schema=schema))
                count += len(rows)
            counts.append(count)
    return Dataset.from_file(target), counts


def _open(path: Path, setting: str) -> tuple[tuple[str, pa.StructType], Pieces]:
    """Return the suffix of a file with the type of its rows, and the rows. A file without columns
    has no rows."""
    suffix = suffix_of(path.name)
    with _errors_name(path, setting):
        if not path.stat().st_size:
            return (suffix, pa.struct([])), iter(())
        rows, pieces = TYPES[suffix](path)
    return (suffix, rows), _named(pieces, path, setting)


def _named(pieces: Pieces, path: Path, setting: str) -> Pieces:
    with _errors_name(path, setting):
        yield from pieces


@contextlib.contextmanager
def _errors_name(path: Path, setting: str) -> Iterator[None]:
    """Raise RLHFError with the name of the file for an error of this block."""
    try:
        yield
    except RLHFError:
        raise
    except Exception as error:
        reason = getattr(error, "strerror", None) or first_line(error)
        raise RLHFError(f"{setting}: cannot read {path}: {reason}") from error


def _json(path: Path) -> tuple[pa.StructType, Pieces]:
    return pa.struct([(TEXT, pa.large_string())]), _json_pieces(path)


def _json_pieces(path: Path) -> Pieces:
    rows = _texts(path)
    while chunk := list(islice(rows, CHUNK)):
        lines, texts = zip(*chunk, strict=True)
        yield lines, pa.StructArray.from_arrays([pa.array(texts, pa.large_string())], [TEXT])


def _texts(path: Path) -> Iterator[tuple[int, str]]:
    """Yield the line number, from 1, and the text of each row; line 0 in a JSON array."""
    number = 0
    try:
        with _opener(path)(path, "rb") as file:
            first = True
            for number, line in enumerate(file, start=1):
                if not line.strip(codecs.BOM_UTF8 + WHITE):
                    continue
                if first and line.lstrip(codecs.BOM_UTF8 + WHITE).startswith(b"["):
                    yield from _array(path, line + file.read())
                    return
                first = False
                if line.strip():
                    yield number, line.decode("utf-8-sig" if number == 1 else "utf-8")
    except UnicodeDecodeError as error:
        raise RLHFError(f"{path} line {number}: not UTF-8: {first_line(error)}") from error
    except (OSError, EOFError, zlib.error) as error:
        raise RLHFError(f"{path} line {number + 1}: cannot be read: {first_line(error)}") from error


def _array(path: Path, text: bytes) -> Iterator[tuple[int, str]]:
    try:
        rows = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise RLHFError(f"{path}: not valid JSON: {error}") from None
    for row in rows:
        yield 0, json.dumps(row)


def _csv(path: Path) -> tuple[pa.StructType, Pieces]:
    """Read all cells as text. A column without a name, as pandas gives row numbers, is left out."""
    with contextlib.closing(_csv_rows(path)) as rows:
        header = next(rows, [])
    names = [name for name in header if name.strip()]
    if header and not names:
        raise ValueError("no column has a name; write the names in the first line")
    _check_distinct(names)
    return pa.struct([(name, pa.large_string()) for name in names]), _csv_pieces(path)


def _csv_pieces(path: Path) -> Pieces:
    rows = _csv_rows(path)
    header = next(rows, [])
    names = [name for name in header if name.strip()]
    while chunk := list(islice(rows, CHUNK)):
        # The last cells of a short row are empty.
        table = zip_longest(header, *chunk, fillvalue="")
        columns = [cells for name, *cells in table if name.strip()]
        arrays = [pa.array(cells, pa.large_string()) for cells in columns]
        yield repeat(0), pa.StructArray.from_arrays(arrays, names)


def _csv_rows(path: Path) -> Generator[list[str], None, None]:
    """Yield the cells of each line that is not blank, of the column names first."""
    limit = csv.field_size_limit(sys.maxsize)
    start, width = 1, 0
    try:
        with _opener(path)(path, "rt", encoding="utf-8-sig", newline="") as file:
            reader = csv.reader(chain(file, [END]))
            for row in reader:
                if row == [END]:
                    return
                if row and row[-1].endswith(END):
                    raise ValueError(f"line {start} has a quote that is not closed")
                blank = not row or (len(row) == 1 and row[0] and not row[0].strip(" \t"))
                if not blank:
                    width = width or len(row)
                    if len(row) > width:
                        raise ValueError(
                            f"line {start} has {len(row)} cells for {counted(width, 'column')}; "
                            "put quotes around cells with commas"
                        )
                    yield row
                start = reader.line_num + 1
    except UnicodeDecodeError as error:
        raise ValueError(f"not UTF-8: {first_line(error)}") from error
    finally:
        csv.field_size_limit(limit)


def _opener(path: Path) -> Any:
    """Return the function that opens a file, which may be compressed."""
    return gzip.open if path.name.lower().endswith(".gz") else open


def _parquet(path: Path) -> tuple[pa.StructType, Pieces]:
    # Late: the import takes time.
    import pyarrow.parquet as pq

    def batches() -> Iterator[pa.RecordBatch]:
        with path.open("rb") as file:
            # Else a whole row group is in memory, which may be the whole file.
            table = pq.ParquetFile(file, pre_buffer=False, buffer_size=BUFFER)
            for group in range(table.num_row_groups):
                yield from table.iter_batches(CHUNK, row_groups=[group])

    with path.open("rb") as file:
        return _table(pq.read_schema(file), batches())


def _arrow(path: Path) -> tuple[pa.StructType, Pieces]:
    def batches() -> Iterator[pa.RecordBatch]:
        with path.open("rb") as file:
            reader = _arrow_reader(file)
            if isinstance(reader, pa.RecordBatchFileReader):
                yield from map(reader.get_batch, range(reader.num_record_batches))
            else:
                yield from reader

    with path.open("rb") as file:
        return _table(_arrow_reader(file).schema, batches())


def _arrow_reader(file: Any) -> Any:
    """Return a reader of one of the two formats of Arrow files."""
    try:
        return pa.ipc.open_stream(file)
    except pa.ArrowInvalid:
        return pa.ipc.open_file(file)


def _table(schema: pa.Schema, batches: Iterator[pa.RecordBatch]) -> tuple[pa.StructType, Pieces]:
    """Return the type of the rows of a table and the rows, with the types that `datasets` has."""
    from datasets import Features
    from datasets.table import table_cast

    _check_distinct(schema.names)
    columns = Features.from_arrow_schema(schema).arrow_schema

    def pieces() -> Pieces:
        for batch in batches:
            # A damaged file has offsets beyond its end.
            batch.validate(full=True)
            table = table_cast(pa.Table.from_batches([batch]), columns)
            for part in table.to_batches():
                yield repeat(0), pa.StructArray.from_arrays(part.columns, fields=list(columns))

    return pa.struct(list(columns)), pieces()


def _check_distinct(names: Sequence[str]) -> None:
    for name, count in Counter(names).items():
        if count > 1:
            raise ValueError(f"{count} columns are called {name!r}; rename them")


TYPES: dict[str, Callable[[Path], tuple[pa.StructType, Pieces]]] = {
    **dict.fromkeys((".jsonl", ".jsonl.gz", ".json", ".json.gz", ".ndjson"), _json),
    **dict.fromkeys((".csv", ".csv.gz"), _csv),
    ".parquet": _parquet,
    ".arrow": _arrow,
}
"""What reads a file: it returns the type of the rows, and the rows. It is the end of the name that
says how."""
