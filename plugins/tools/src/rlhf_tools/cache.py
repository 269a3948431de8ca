"""`rlhf cache`: what runs keep on disk for later ones, and its removal. Imports no torch."""

import json
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

from attrs import frozen
from filelock import FileLock, Timeout

from rlhf.cli import cache_root
from rlhf.errors import RLHFError, counted
from rlhf_tools.table import print_table

WHOLE = ("bytecode", "kernels")
"""Folders of the cache that are removed as a whole; of others each folder within."""
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
    many days. Returns 0."""
    root = cache_root()
    entries = sorted(entries_of(root), key=lambda entry: entry.used)
    if prune is not None:
        old = [entry for entry in entries if entry.used < time.time() - prune * DAY]
        removed = [entry for entry in old if remove(entry)]
        print(f"removed {counted(len(removed), 'folder')} of {root}, {size_of(removed)}")
    elif as_json:
        found = [{"name": it.name, "bytes": it.size, "days": days_since(it)} for it in entries]
        print(json.dumps({"folder": str(root), "entries": found}, indent=2))
    else:
        head = ("folder", "size", "last used")
        rows = [(it.name, size_of([it]), when(it)) for it in entries]
        print_table([head, *rows])
        print(f"{root}: {counted(len(entries), 'folder')}, {size_of(entries)}")
    return 0


def entries_of(root: Path) -> Iterator[Entry]:
    """Yield what the cache has."""
    for kind in folders_in(root):
        for path in [kind] if kind.name in WHOLE else folders_in(kind):
            files = [file.lstat() for file in path.rglob("*") if not file.is_dir()]
            times = [max(file.st_atime, file.st_mtime) for file in files]
            used = max(times, default=path.lstat().st_mtime)
            size = sum(file.st_size for file in files)
            yield Entry(path, path.relative_to(root).as_posix(), size, used)


def folders_in(folder: Path) -> list[Path]:
    """Return the folders in a folder, none if it does not exist. Raises RLHFError if it cannot be
    read."""
    try:
        return sorted(path for path in folder.iterdir() if path.is_dir() and not path.is_symlink())
    except FileNotFoundError:
        return []
    except OSError as error:
        raise RLHFError(f"cannot read {folder}: {error.strerror}") from None


def remove(entry: Entry) -> bool:
    """Remove an entry, unless a run is writing it; return whether it is gone. Runs that read its
    files keep them."""
    lock = entry.path.with_suffix(".lock")
    try:
        if not lock.exists():
            shutil.rmtree(entry.path)
            return True
        with FileLock(lock, timeout=0):
            shutil.rmtree(entry.path)
            lock.unlink()
    except Timeout:
        return False
    except OSError as error:
        raise RLHFError(f"cannot remove {entry.path}: {error.strerror}") from None
    return True


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
        if size < 1000:
            return f"{size:.3g} {unit}"
        size /= 1000
    return f"{size:,.1f} GB"
