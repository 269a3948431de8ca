"""`rlhf cache`: what runs keep on disk for later ones, and its removal. Imports no torch."""

import json
import os
import re
import shutil
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from attrs import frozen
from filelock import FileLock, Timeout

from rlhf.cli import cache_root
from rlhf.errors import RLHFError, counted
from rlhf_tools.table import print_table

KEY = re.compile(r"[0-9a-f]{32}(-first\d+)?")
"""The name of a folder of rows, or of values that a model has computed. What has another name is
not touched: the cache may lie in a folder with other files."""
DAY = 86400


@frozen
class Entry:
    """A folder of the cache that can be removed by itself."""

    path: Path
    name: str
    size: int
    """Bytes of its files."""
    used: float
    """When a file of it was last read or written, by the clock of the file system."""


def cache_command(prune: float | None, *, as_json: bool) -> int:
    """List the cache, the longest unused first; with `prune` remove what no run has used for so
    many days. Returns 0, or 2 if something could not be removed."""
    root = cache_root()
    entries = sorted(entries_of(root), key=lambda entry: entry.used)
    if prune is not None:
        return prune_entries(root, entries, time.time() - prune * DAY)
    if as_json:
        found = [{"name": it.name, "bytes": it.size, "days": days_since(it)} for it in entries]
        print(json.dumps({"folder": str(root), "entries": found}, indent=2))
        return 0
    head = ("folder", "size", "last used")
    print_table([head, *((it.name, size_of([it]), when(it)) for it in entries)])
    print(f"{root}: {counted(len(entries), 'folder')}, {size_of(entries)}")
    return 0


def prune_entries(root: Path, entries: list[Entry], before: float) -> int:
    """Remove the entries that were last used before a time; return the exit code."""
    removed, failed = [], 0
    for entry in entries:
        # A run may have begun to use it since it was listed.
        if entry.used < before and last_use(entry.path) < before:
            try:
                remove(entry.path)
                removed.append(entry)
            except Timeout:
                print(f"kept {entry.name}, which a run is writing")
            except OSError as error:
                failed += 1
                print(f"cannot remove {entry.path}: {error.strerror}", file=sys.stderr)
    print(f"removed {counted(len(removed), 'folder')} of {root}, {size_of(removed)}")
    return 2 if failed else 0


def entries_of(root: Path) -> Iterator[Entry]:
    """Yield what the cache has."""
    for kind in folders_in(root):
        for path in folders_in(kind):
            if KEY.fullmatch(path.name) and not path.is_symlink():
                size = sum(file.st_size for file in files_in(path))
                yield Entry(path, path.relative_to(root).as_posix(), size, last_use(path))


def folders_in(folder: Path) -> list[Path]:
    """Return the folders in a folder, none if it does not exist. Raises RLHFError if it cannot be
    read."""
    try:
        return sorted(path for path in folder.iterdir() if path.is_dir())
    except FileNotFoundError:
        return []
    except OSError as error:
        raise RLHFError(f"cannot read {folder}: {error.strerror}") from None


def files_in(folder: Path) -> Iterator[os.stat_result]:
    """Yield what is known of the files in a folder and those within. Others may be removing
    them."""
    for parent, _, names in os.walk(folder):
        for name in names:
            with suppress(OSError):
                yield Path(parent, name).lstat()


def last_use(folder: Path) -> float:
    """Return when a file of a folder was last read or written; now if it has no file that can be
    read, since a run may be writing it."""
    times = [max(file.st_atime, file.st_mtime) for file in files_in(folder)]
    return max(times, default=time.time())


def remove(folder: Path) -> None:
    """Remove a folder of the cache at once. Runs that have opened its files keep them, except on
    other hosts. Raises OSError, and Timeout while a run is writing it."""
    lock = folder.with_name(f"{folder.name}.lock")
    aside = folder.with_name(f"{folder.name}.removed-{os.getpid()}")
    if not lock.exists():  # What models have computed is written file by file.
        folder.rename(aside)
    else:
        with FileLock(lock, timeout=0):
            folder.rename(aside)
    shutil.rmtree(aside)


def days_since(entry: Entry) -> float:
    """Return for how many days an entry has not been used."""
    return round(max(0.0, time.time() - entry.used) / DAY, 2)


def when(entry: Entry) -> str:
    """Return when an entry was last used in words."""
    days = int(days_since(entry))
    return f"{counted(days, 'day')} ago" if days else "today"


def size_of(entries: list[Entry]) -> str:
    """Return the size of entries in words."""
    size = float(sum(entry.size for entry in entries))
    for unit in ("B", "kB", "MB"):
        if size < 999.5:
            return f"{size:.3g} {unit}"
        size /= 1000
    return f"{size:,.1f} GB"
