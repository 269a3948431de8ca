"""Which files of a folder belong to which split, as `datasets` decides it for repositories."""

import re
from collections.abc import Callable, Collection, Sequence
from pathlib import Path, PurePosixPath

from rlhf.data.file_types import TYPES, suffix_of

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


def has_subsets(folder: Path) -> bool:
    """Return whether README.md describes subsets of the folder."""
    card = folder / "README.md"
    return card.is_file() and bool(CARD.match(card.read_text(errors="replace", encoding="utf-8")))


def files_of_splits(folder: Path) -> dict[str, list[str]]:
    """Return the files of rows of each split, by their paths in the folder; no split if it has no
    such file.

    The names of shards tell the splits, else those of folders, else those of files, and other files
    do not count then. If no name tells a split, all files are `train`.
    """
    files = _files(folder)
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


def _files(folder: Path) -> list[str]:
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
