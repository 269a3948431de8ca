"""Sources of rows: files, folders, hub names and the embedded demo, read as Arrow tables through
`datasets`, which is imported only then, for start-up time."""

from __future__ import annotations

import codecs
import contextlib
import csv
import functools
import gzip
import hashlib
import itertools
import json
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
from attrs import frozen

from rlhf.config.sections import DataEntry
from rlhf.config.source_names import is_local, local_path
from rlhf.data.columns import Columns, errors_at
from rlhf.errors import RLHFError, counted, first_line
from rlhf.folder.disk import sha256

if TYPE_CHECKING:
    import datasets

LINES = (".jsonl", ".jsonl.gz", ".json", ".json.gz", ".ndjson")
TABLES = {".csv": "csv", ".csv.gz": "csv", ".parquet": "parquet", ".arrow": "arrow"}
SCALARS = ("label", "margin")
"""Columns whose text in CSV is read as true, false or a number."""
MAY_BE_EMPTY = ("prompt", "completion", "chosen", "rejected")
"""Columns whose empty cells in CSV are empty text; other columns are missing there."""
DEMO = "demo:"
TEXT = "json text"
"""The column that holds a row of JSON as text. Arrow's own JSON reader would give every row the
keys of all the others (with null), which breaks tools and their arguments."""
LINE = "line"
CHUNK = 10_000
WHITE = b" \t\r\n"


@frozen
class Source:
    """One entry of `data.train` or `data.eval`."""

    entry: DataEntry
    which: str
    """`train` or `eval`."""
    format: str
    """The row format in which a demo gives its rows."""

    @functools.cached_property
    def _suffix(self) -> str:
        if self.entry.path.startswith(DEMO):
            return ""
        path = Path(self.entry.path.lower())
        return Path(path.stem).suffix + path.suffix if path.suffix == ".gz" else path.suffix

    def digest(self) -> str:
        """Return a digest of the files' bytes. Raises RLHFError if they are missing."""
        if self.entry.path.startswith(DEMO):
            return _digest(json.dumps(row).encode() for row in self._demo_rows())
        place = self._local()
        if place is None:
            return str(self._splits(self.entry.path)._fingerprint)
        try:
            if place.is_file():
                return f"{sha256(place)}{self._suffix}"
            files = sorted(file for file in place.rglob("*") if file.is_file())
            return _digest(f"{f.relative_to(place)} {sha256(f)}".encode() for f in files)
        except OSError as error:
            where = error.filename or place
            raise self._error(f"cannot read {where}: {error.strerror}") from error

    def read(self, scratch: Path) -> datasets.Dataset:
        """Return the rows, mapped into memory; `scratch` is a folder for temporary files."""
        import datasets

        if self.entry.path.startswith(DEMO):
            rows = [json.dumps(row) for row in self._demo_rows()]
            return datasets.Dataset(pa.table({TEXT: rows, LINE: np.arange(len(rows))}))
        place = self._local()
        if place is None:
            return self._splits(self.entry.path)
        if place.is_dir():
            return self._folder(place, scratch)
        for name in ("subset", "split"):
            if getattr(self.entry, name) is not None:
                raise self._error(f"{place} is a file; remove {name}")
        if self._suffix in LINES:
            return _json_rows(place, scratch)
        if self._suffix in TABLES:
            builder = TABLES[self._suffix]
            return self._load(builder, data_files=str(place), split="train", cache_dir=str(scratch))
        raise self._error(f"unknown file type {place}; use one of {', '.join([*LINES, *TABLES])}")

    def row(self, columns: Columns, number: int) -> tuple[str, Columns]:
        """Return the place of row `number` of `read`, and the row with its columns renamed. Raises
        RLHFError for bad JSON and for a column that does not exist."""
        line = self.line(columns)
        where = f"{self.entry.path} line {line}" if line else f"{self.entry.path} row {number}"
        with errors_at(where):
            if TEXT in columns:
                return where, self._renamed(parse_object(columns[TEXT]))
            row = without_nulls(self._renamed(dict(columns)))
            return where, _scalars(row) if TABLES.get(self._suffix) == "csv" else row

    def line(self, columns: Columns) -> int:
        """Return the line of the file that a row of `read` is, from 1; 0 if files have no lines."""
        return columns.get(LINE, 0) if self._suffix in LINES else 0

    def _renamed(self, row: dict[str, Any]) -> dict[str, Any]:
        for target, source in self.entry.columns.items():
            if source not in row:
                raise RLHFError(
                    f"data.{self.which} maps `{target}` to column `{source}`, which does not "
                    f"exist; columns: {', '.join(row)}"
                )
        taken = set(self.entry.columns.values())
        kept = {name: value for name, value in row.items() if name not in taken}
        return kept | {target: row[source] for target, source in self.entry.columns.items()}

    def _local(self) -> Path | None:
        """Return the file or folder, None for a hub name. Raises RLHFError for a missing file."""
        place = local_path(self.entry.path)
        if place.exists():
            return place
        if self._suffix in (*LINES, *TABLES) or is_local(self.entry.path):
            raise self._error(f"no such file or folder: {self.entry.path}")
        return None

    def _folder(self, place: Path, scratch: Path) -> datasets.Dataset:
        import datasets

        if not any((place / name).exists() for name in ("state.json", "dataset_dict.json")):
            return self._splits(str(place), cache_dir=str(scratch))
        try:
            loaded = datasets.load_from_disk(str(place))
        except Exception as error:
            raise self._error(f"cannot read {place}: {first_line(error)}") from error
        if isinstance(loaded, datasets.Dataset):
            if self.entry.split is not None:
                raise self._error(f"{place} has no splits; remove split")
            return loaded
        split = self.entry.split or "train"
        if split not in loaded:
            raise self._error(f"{place} has no split {split!r}; available: {', '.join(loaded)}")
        return loaded[split]

    def _splits(self, name: str, **keywords: Any) -> datasets.Dataset:
        """Return the rows of a hub name, or of a folder with the layout of a hub's repository."""
        split = self.entry.split or "train"
        return self._load(name, name=self.entry.subset, split=split, **keywords)

    def _load(self, what: str, **keywords: Any) -> datasets.Dataset:
        """Return what `datasets` loads. For files, `cache_dir` is a temporary folder: its own cache
        tells them apart by their times and not by their bytes."""
        import datasets

        try:
            with quiet():
                if what == "csv":
                    keywords |= _as_text(keywords["data_files"])
                return datasets.load_dataset(what, **keywords)
        except Exception as error:
            reason = first_line(error.__cause__ or error)
            raise self._error(f"cannot read {self.entry.path}: {reason}") from error

    def _error(self, text: str) -> RLHFError:
        return RLHFError(f"data.{self.which}: {text}")

    def _demo_rows(self) -> list[dict[str, Any]]:
        from rlhf import demo

        split = self.entry.split or self.which
        return demo.rows(self.entry.path.removeprefix(DEMO), split, self.format)


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Silence progress bars and logging of `datasets`; its exceptions say what is wrong."""
    import datasets

    shown, level = not datasets.are_progress_bars_disabled(), datasets.logging.get_verbosity()
    datasets.disable_progress_bars()
    datasets.logging.set_verbosity(datasets.logging.CRITICAL)
    try:
        yield
    finally:
        datasets.logging.set_verbosity(level)
        if shown:
            datasets.enable_progress_bars()


def without_nulls(value: Any) -> Any:
    """Return the value without null keys: Arrow gives mappings the keys of all neighbours."""
    if isinstance(value, Mapping):
        return {key: without_nulls(item) for key, item in value.items() if item is not None}
    if isinstance(value, list):
        return [without_nulls(item) for item in value]
    return value


def _json_rows(path: Path, scratch: Path) -> datasets.Dataset:
    """Return the rows of a JSON or JSON lines file as text, in an Arrow file in `scratch`."""
    import datasets

    schema = pa.schema({TEXT: pa.large_string(), LINE: pa.int64()})
    target = scratch / "rows.arrow"
    rows = _texts(path)
    with pa.OSFile(str(target), "wb") as sink, pa.ipc.new_stream(sink, schema) as writer:
        while chunk := list(itertools.islice(rows, CHUNK)):
            lines, texts = map(list, zip(*chunk, strict=True))
            writer.write_batch(pa.record_batch([texts, lines], schema=schema))
    return datasets.Dataset.from_file(str(target))


def _texts(path: Path) -> Iterator[tuple[int, str]]:
    """Yield the line number, from 1, and the text of each row; line 0 in a JSON array."""
    opener = gzip.open if path.suffix.lower() == ".gz" else open
    number = 0
    try:
        with opener(path, "rb") as file:
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


def parse_object(text: str, what: str = "a row") -> dict[str, Any]:
    """Return the JSON object in `text`, which errors call `what`."""
    try:
        row = json.loads(text)
        if "\\ud" in text.lower():
            json.dumps(row, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        half = error.object[error.start : error.end]
        raise RLHFError(f"{half!a} is half of a surrogate pair; write both halves") from None
    except (ValueError, RecursionError) as error:
        raise RLHFError(f"not valid JSON: {error}") from None
    if not isinstance(row, dict):
        raise RLHFError(f"{what} must be a JSON object, not {text.strip()[:40]}")
    return row


def _as_text(path: str) -> dict[str, Any]:
    """Return options that keep all CSV cells as text: by default pandas reads the answers `None`
    and `NA` as missing and `007` as 7. Raises RLHFError if the first row has more cells than there
    are columns: pandas would take its first ones for names of rows."""
    import datasets

    opener: Any = gzip.open if path.lower().endswith(".gz") else open
    with opener(path, "rt", encoding="utf-8-sig", newline="") as file:
        rows = filter(None, csv.reader(file))
        columns, first = next(rows, []), []
        with contextlib.suppress(csv.Error):  # A cell longer than this module allows.
            first = next(rows, [])
    if len(first) > len(columns):
        raise RLHFError(
            f"the first row has {len(first)} cells for {counted(len(columns), 'column')}; put "
            "quotes around cells with commas"
        )
    text = datasets.Features({name: datasets.Value("string") for name in columns}) or None
    return {"features": text, "keep_default_na": False}


def _scalars(row: dict[str, Any]) -> dict[str, Any]:
    """Return a row of CSV without empty cells, unless text may be empty there, and with its label
    and margin parsed."""
    kept = {name: value for name, value in row.items() if value != "" or name in MAY_BE_EMPTY}
    for name in SCALARS:
        if isinstance(kept.get(name), str):
            with contextlib.suppress(ValueError):
                kept[name] = json.loads(kept[name].strip().lower())
    return kept


def _digest(parts: Iterator[bytes]) -> str:
    whole = hashlib.sha256()
    for part in parts:
        whole.update(part + b"\n")
    return whole.hexdigest()
