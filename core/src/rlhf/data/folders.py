"""Data sets of several files: folders, and names on the hub, which `datasets` reads. Files of a
folder belong to splits as `datasets` decides it for repositories."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from itertools import accumulate
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any

import numpy as np
from attrs import frozen
from numpy.typing import NDArray

from rlhf.config.sections import DataEntry
from rlhf.data.file_types import TYPES, read_files, suffix_of
from rlhf.errors import RLHFError, first_line

if TYPE_CHECKING:
    import datasets

SAVED = ("state.json", "dataset_dict.json")
"""Files of a folder that `datasets` has saved; one of them is there."""
SPECIAL = set("*?[]{}:")


@frozen
class Folder:
    """What an entry of `setting` reads of a folder."""

    path: Path
    entry: DataEntry
    setting: str

    def files(self) -> list[str]:
        """Return the paths of the files that are read, relative to the folder."""
        splits = self._splits()
        if splits is None:
            return sorted(path.relative_to(self.path).as_posix() for path in _files(self.path))
        return list(dict.fromkeys(name for names in splits.values() for name in names))

    def read(self, scratch: Path) -> datasets.Dataset:
        """Return the rows, mapped into memory; `scratch` is a folder for temporary files."""
        if self._is_saved:
            return self._read_saved(scratch)
        splits = self._splits()
        if splits is None:
            name = str(_linked(self.path, scratch))
            return load_dataset(name, self.entry, self.setting, cache_dir=str(scratch))
        files = self.files()
        paths = {f"/{name}": self.path / name for name in files}
        rows, counts = read_files(paths, scratch, self.setting)
        if self._split in splits:
            return rows
        return rows.select(self._numbers(splits, dict(zip(files, counts, strict=True))))

    @property
    def _split(self) -> str:
        """One split, or several or parts of them, as in `train[:10%]+test`."""
        return self.entry.split or "train"

    @property
    def _is_saved(self) -> bool:
        return any((self.path / name).exists() for name in SAVED)

    def _splits(self) -> dict[str, list[str]] | None:
        """Return the files of each split that is read; None if `datasets` reads the folder."""
        card = self.path / "README.md"
        text = card.read_text(encoding="utf-8", errors="replace") if card.is_file() else ""
        splits = {} if self._is_saved or CARD.match(text) else files_of_splits(self.path)
        if not splits:
            return None
        if self.entry.subset not in (None, "default"):
            raise RLHFError(f"{self.setting}: {self.path} has no subsets; remove subset")
        chosen = named_splits(self._split, splits)
        for name in chosen:
            if name not in splits:
                raise self._no_split(name, splits)
        return {name: splits[name] for name in chosen}

    def _numbers(
        self, splits: Mapping[str, list[str]], counts: Mapping[str, int]
    ) -> NDArray[np.int64]:
        """Return which rows the split has, of files with these numbers of rows."""
        from datasets import ReadInstruction

        first = dict(zip(counts, accumulate(counts.values(), initial=0), strict=False))
        rows = {
            split: np.concatenate([first[name] + np.arange(counts[name]) for name in names])
            for split, names in splits.items()
        }
        lengths = {split: len(numbers) for split, numbers in rows.items()}
        with _errors(str(self.path), self.path, self.setting):
            spec = "+".join(splits) if self._split == "all" else self._split
            parts = ReadInstruction.from_spec(spec).to_absolute(lengths)
        return np.concatenate([rows[part.splitname][part.from_ : part.to] for part in parts])

    def _read_saved(self, scratch: Path) -> datasets.Dataset:
        """Return the rows of a folder that `datasets` has saved."""
        import datasets

        name = str(_linked(self.path, scratch))
        with _errors(name, self.path, self.setting):
            loaded = datasets.load_from_disk(name)
        if isinstance(loaded, datasets.Dataset):
            if self.entry.split is not None:
                raise RLHFError(f"{self.setting}: {self.path} has no splits; remove split")
            return loaded
        if self._split not in loaded:
            raise self._no_split(self._split, loaded)
        return loaded[self._split]

    def _no_split(self, name: str, splits: Mapping[str, Any]) -> RLHFError:
        available = ", ".join(splits)
        return RLHFError(
            f"{self.setting}: {self.path} has no split {name!r}; available: {available}"
        )


def load_dataset(name: str, entry: DataEntry, setting: str, **keywords: Any) -> datasets.Dataset:
    """Return the rows of a data set on the hub, or of a folder that only `datasets` can read. For a
    folder, `cache_dir` is a temporary one: the own cache of `datasets` tells files apart by their
    times and not by their bytes."""
    import datasets

    split = entry.split or "train"
    with _errors(name, entry.path, setting), quiet():
        return datasets.load_dataset(name, name=entry.subset, split=split, **keywords)


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


@contextlib.contextmanager
def _errors(name: str, path: str | Path, setting: str) -> Iterator[None]:
    """Raise RLHFError for an error of `datasets` in this block, which has read `path` as `name`."""
    try:
        yield
    except Exception as error:
        reason = first_line(error.__cause__ or error).replace(name, str(path))
        raise RLHFError(f"{setting}: cannot read {path}: {reason}") from error


def _files(folder: Path) -> Iterator[Path]:
    return (path for path in folder.rglob("*") if path.is_file())


def _linked(folder: Path, scratch: Path) -> Path:
    """Return the folder, or a copy of it in `scratch` whose files are links if its path has a
    character that `datasets` takes for a pattern or a part of a URL."""
    if not SPECIAL & set(f"{folder.absolute()}{folder.resolve()}"):
        return folder
    copy = scratch / "folder"
    copy.mkdir()
    for path in _files(folder):
        link = copy / path.relative_to(folder)
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(path.absolute())
    return copy


CARD = re.compile(r"\ufeff?---\s*\n(.*\n)?configs:.*?\n---", re.DOTALL)
"""The beginning of a README.md that describes the subsets of a repository."""
METADATA = (
    "config.json", "dataset_dict.json", "dataset_info.json", "dataset_infos.json", "state.json",
)  # fmt: skip
"""Files that describe a data set and have no rows."""
SHARD = re.compile(r"data/(\w+(?:\.\w+)*)-\d{5}-of-\d{5}[^/]*")
"""The name of a file that `push_to_hub` of `datasets` wrote."""
WORDS = {
    "train": ("train", "training"),
    "validation": ("validation", "valid", "dev", "val"),
    "test": ("test", "testing", "eval", "evaluation"),
}
FORMS = ("(^|/){}(/|$)", "(^|/){}[-._ 0-9]", "[-._ 0-9]{}(/|$)", "[-._ 0-9]{}[-._ 0-9]")
"""Where in the name of a folder or a file a word is one of `WORDS`."""


def files_of_splits(folder: Path) -> dict[str, list[str]]:
    """Return the files of rows of each split, by their paths in the folder; no split if it has no
    such file.

    The names of shards tell the splits, else those of folders, else those of files, and other files
    do not count then. If no name tells a split, all files are `train`.
    """
    files = _row_files(folder)
    shards: dict[str, list[str]] = {}
    for name in files:
        if match := SHARD.fullmatch(name):
            shards.setdefault(match[1], []).append(name)
    return (
        shards
        or _by_word(files, lambda path: str(path.parent))
        or _by_word(files, lambda path: path.name)
        or ({"train": files} if files else {})
    )


def named_splits(split: str, splits: Collection[str]) -> list[str]:
    """Return the names in `split`, which may be several splits or parts of them."""
    if split in splits:
        return [split]
    if split == "all":
        return list(splits)
    return list(dict.fromkeys(part.partition("[")[0].strip() for part in split.split("+")))


def _row_files(folder: Path) -> list[str]:
    """Return the files of rows in a folder and those within, without hidden ones, in order."""
    paths = (path.relative_to(folder) for path in folder.rglob("*") if path.is_file())
    return sorted(
        path.as_posix()
        for path in paths
        if suffix_of(path.name) in TYPES
        and path.name not in METADATA
        and not any(part.startswith(".") for part in path.parts)
        and not any(part.startswith("__") for part in path.parts[:-1])
    )


def _by_word(files: Sequence[str], part: Callable[[PurePosixPath], str]) -> dict[str, list[str]]:
    """Return the splits that words in a part of the path tell, in the order of `datasets`."""
    splits = {}
    for split, words in WORDS.items():
        patterns = [re.compile(form.format(word)) for word in words for form in FORMS]
        splits[split] = [
            name for each in patterns for name in files if each.search(part(PurePosixPath(name)))
        ]
    return {split: list(dict.fromkeys(names)) for split, names in splits.items() if names}
