"""Sources of rows: files, folders, hub names and demos, read as Arrow tables through
`datasets`, which is imported only then, for start-up time."""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
from attrs import frozen

from rlhf.config.field_docs import documented
from rlhf.config.sections import DataEntry
from rlhf.config.source_names import DEMO, is_local, local_path
from rlhf.data.columns import Columns, errors_at
from rlhf.data.file_types import PLACE, TEXT, TYPES, read_files, suffix_of
from rlhf.data.folders import Folder, load_dataset
from rlhf.errors import RLHFError
from rlhf.folder.disk import sha256
from rlhf.registry.imports import demo_plugin

if TYPE_CHECKING:
    import datasets

SCALARS = ("label", "margin")
"""Columns whose text in CSV is read as true, false or a number."""
MAY_BE_EMPTY = ("prompt", "completion", "chosen", "rejected")
"""Columns whose empty cells in CSV are empty text; other columns are missing there."""


@documented
@frozen
class Source:
    """Reads the rows of one entry of `data.train` or `data.eval`."""

    entry: DataEntry
    """The entry."""
    which: str
    """`train` or `eval`."""
    format: str
    """The row format in which a demo gives its rows."""

    @property
    def name(self) -> str:
        """What the name of a row begins with; its `place` follows."""
        return self.entry.path.rstrip("/")

    @property
    def folder(self) -> Path:
        """Where relative paths of images begin: at the file, or in the folder; for other sources in
        the current folder."""
        path = local_path(self.entry.path)
        return path.parent if path.is_file() else path if path.is_dir() else Path()

    def digest(self) -> str:
        """Return a digest of the bytes that are read. Raises RLHFError if files are missing."""
        if self.entry.path.startswith(DEMO):
            return _digest(json.dumps(row) for row in self._demo_rows())
        path = self._local()
        if path is None:
            return str(load_dataset(self.entry.path, self.entry, self._setting)._fingerprint)
        if path.is_file():
            return f"{self._sha256(path)}{suffix_of(path.name)}"
        files = Folder(path, self.entry, self._setting).files()
        return _digest(f"{name} {self._sha256(path / name)}" for name in files)

    def read(self, scratch: Path) -> datasets.Dataset:
        """Return the rows, mapped into memory; `scratch` is a folder for temporary files."""
        import datasets

        if self.entry.path.startswith(DEMO):
            return datasets.Dataset(pa.table({TEXT: [*map(json.dumps, self._demo_rows())]}))
        path = self._local()
        if path is None:
            return load_dataset(self.entry.path, self.entry, self._setting)
        if path.is_dir():
            return Folder(path, self.entry, self._setting).read(scratch)
        for name in ("subset", "split"):
            if getattr(self.entry, name) is not None:
                raise self._error(f"{path} is a file; remove {name}")
        if suffix_of(path.name) not in TYPES:
            raise self._error(f"unknown file type {path}; use one of {', '.join(TYPES)}")
        return read_files({"": path}, scratch, self._setting)[0]

    def row(self, columns: Columns, number: int) -> tuple[str, Columns]:
        """Return the name of row `number` of `read`, and the row with its columns renamed. Raises
        RLHFError for bad JSON and for a column that does not exist."""
        where, kind = self.name + self.place(columns, number), ""
        if PLACE in columns:
            kind, columns = next(
                (kind, row) for kind, row in columns.items() if kind != PLACE and row is not None
            )
        with errors_at(where):
            if TEXT in columns:
                return where, self._renamed(parse_object(columns[TEXT]))
            row = without_nulls(self._renamed(dict(columns)))
            return where, _scalars(row) if ".csv" in kind else row

    def place(self, columns: Columns, number: int) -> str:
        """Return what follows `name` in the name of row `number` of `read`, such as ` line 3`."""
        return columns.get(PLACE) or f" row {number}"

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
        path = local_path(self.entry.path)
        if path.exists():
            return path
        if suffix_of(path.name) in TYPES or is_local(self.entry.path):
            raise self._error(f"no such file or folder: {self.entry.path}")
        return None

    def _sha256(self, path: Path) -> str:
        try:
            return sha256(path)
        except OSError as error:
            raise self._error(f"cannot read {path}: {error.strerror}") from error

    @property
    def _setting(self) -> str:
        return f"data.{self.which}"

    def _error(self, text: str) -> RLHFError:
        return RLHFError(f"{self._setting}: {text}")

    def _demo_rows(self) -> list[dict[str, Any]]:
        split = self.entry.split or self.which
        return demo_plugin(self.entry.path).rows(split, self.format)


def without_nulls(value: Any) -> Any:
    """Return the value without null keys: Arrow gives mappings the keys of all neighbours."""
    if isinstance(value, Mapping):
        return {key: without_nulls(item) for key, item in value.items() if item is not None}
    if isinstance(value, list):
        return [without_nulls(item) for item in value]
    return value


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


def _scalars(row: dict[str, Any]) -> dict[str, Any]:
    """Return a row of CSV without empty cells, unless text may be empty there, and with its label
    and margin parsed."""
    kept = {name: value for name, value in row.items() if value != "" or name in MAY_BE_EMPTY}
    for name in SCALARS:
        if isinstance(kept.get(name), str):
            with contextlib.suppress(ValueError):
                kept[name] = json.loads(kept[name].strip().lower())
    return kept


def _digest(parts: Iterable[str]) -> str:
    return hashlib.sha256("".join(f"{part}\n" for part in parts).encode()).hexdigest()
