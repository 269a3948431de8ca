"""Checkpoints on disk: a folder is complete or absent, and its manifest proves it.

A checkpoint is written to a hidden folder, synced, given its manifest (size and SHA-256 of every
file) and renamed. The newest one is found by listing the folder, never through a pointer that can
be stale. Older ones are removed only afterwards.
"""

import json
import os
import re
import shutil
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TypeVar

from rlhf.errors import RLHFError
from rlhf.folder.disk import sha256, write_whole

T = TypeVar("T")

MANIFEST = "manifest.json"
FORMAT = 2
"""Number of the format of checkpoints; 1 had DeepSpeed's own files."""
DIGESTS = ".rank-{}.json"
"""Name of what a rank notes of its files, until the manifest has it."""
PART = ".{}.part"
"""Name of a checkpoint that is being written."""
ASIDE = ".{}.aside"
"""Name of a checkpoint that is newer than the one a run was resumed from."""
REPLACED = ".{}.replaced"
"""Name of a checkpoint while another one of the same step takes its place. After a kill at that
moment it is still the checkpoint of its step."""
RESUME = "continue from the previous one with --resume {}"
NAME = re.compile(r"step-(\d{6,})$|\.step-(\d{6,})\.replaced$")
VISIBLE = 60.0
"""Seconds until a network file system shows what other hosts have written."""
THREADS = 8
"""Files that are read at once, to save or to verify a checkpoint."""


def step_folder(checkpoints: Path, step: int) -> Path:
    """Return the folder of the complete checkpoint of `step`."""
    return checkpoints / f"step-{step:06d}"


def part_folder(checkpoints: Path, step: int) -> Path:
    """Return the hidden folder in which the checkpoint of `step` is written."""
    return checkpoints / PART.format(f"step-{step:06d}")


def begin(checkpoints: Path, step: int) -> Path:
    """Return an empty hidden folder to write the checkpoint of `step` into; what killed saves left
    is removed."""
    checkpoints.mkdir(parents=True, exist_ok=True)
    remove_unfinished(checkpoints)
    folder = part_folder(checkpoints, step)
    folder.mkdir()
    return folder


def remove_unfinished(checkpoints: Path) -> None:
    """Remove what killed saves left."""
    for left in checkpoints.glob(PART.format("step-*")):
        shutil.rmtree(left)


def digest(part: Path, paths: Iterable[Path], *, rank: int = 0) -> None:
    """Sync the files of a rank to disk, and note their sizes and SHA-256 for `commit`."""
    names = {str(path.relative_to(part)): path for path in paths}
    files = dict(zip(names, in_threads(_describe, names.values()), strict=True))
    write_whole(part / DIGESTS.format(f"{rank:05d}"), json.dumps(files))


def in_threads(function: Callable[[Path], T], paths: Iterable[Path]) -> list[T]:
    """Return the results of a function that reads a file, for several at once."""
    from multiprocessing.pool import ThreadPool  # late: start-up time

    # Daemon threads: those of an executor would hold up a second Ctrl-C.
    with ThreadPool(THREADS) as pool:
        return pool.map(function, paths)


def digested(part: Path, *, ranks: int) -> bool:
    """Return whether all ranks have written their files."""
    return len(list(part.glob(DIGESTS.format("*")))) == ranks


def commit(checkpoints: Path, step: int, *, ranks: int = 1) -> Path:
    """Give the folder of `step` its manifest, made of the ranks' digests, then its name. Returns
    the renamed folder."""
    part = part_folder(checkpoints, step)
    _await_digests(part, ranks=ranks)
    files: dict[str, dict[str, object]] = {}
    for path in part.glob(DIGESTS.format("*")):
        files |= json.loads(path.read_text(encoding="utf-8"))
        path.unlink()
    manifest = {"format": FORMAT, "step": step, "files": files}
    (part / MANIFEST).write_text(json.dumps(manifest, indent=1, sort_keys=True), encoding="utf-8")
    folders = (path for path in part.rglob("*") if path.is_dir())
    for path in (part / MANIFEST, *folders, part):
        _sync(path)
    target = step_folder(checkpoints, step)
    _rename(part, target)
    return target


def _await_digests(part: Path, *, ranks: int) -> None:
    """Wait until this host sees the files of all ranks."""
    deadline = time.monotonic() + VISIBLE
    while not digested(part, ranks=ranks):
        if time.monotonic() > deadline:
            raise RLHFError(
                f"{part} does not have the files of all ranks; choose an --output that is the same "
                "folder on all hosts"
            )
        time.sleep(0.1)


def _rename(part: Path, target: Path) -> None:
    """Give a complete checkpoint its name, in place of an earlier one of the same step."""
    replaced = target.with_name(REPLACED.format(target.name))
    if target.exists():
        shutil.rmtree(replaced, ignore_errors=True)
        target.rename(replaced)
    part.rename(target)
    _sync(target.parent)
    shutil.rmtree(replaced, ignore_errors=True)


def set_aside(checkpoints: Path, *, after: int) -> list[str]:
    """Hide the checkpoints newer than step `after`, from which a run was resumed. The next rotation
    removes them, once a new checkpoint is complete. Returns their names."""
    every = all_checkpoints(checkpoints)
    later = {name_of(folder): folder for folder in every if step_of(folder) > after}
    for name, folder in later.items():
        aside = checkpoints / ASIDE.format(name)
        shutil.rmtree(aside, ignore_errors=True)
        folder.rename(aside)
    return list(later)


def all_checkpoints(checkpoints: Path) -> list[Path]:
    """Return the folders named like a checkpoint, oldest first, damaged ones included."""
    if not checkpoints.is_dir():
        return []
    folders = [path for path in checkpoints.iterdir() if NAME.match(path.name) and path.is_dir()]
    # Of two folders of one step, the hidden one sorts first and is the older.
    by_step = {step_of(path): path for path in sorted(folders)}
    return [by_step[step] for step in sorted(by_step)]


def step_of(folder: Path) -> int:
    """Return the step in a checkpoint's name."""
    match = NAME.match(folder.name)
    if match is None:
        raise RLHFError(f"{folder} is not a checkpoint; pass a folder named step-NNNNNN")
    return int(match[1] or match[2])


def name_of(folder: Path) -> str:
    """Return the visible name of a checkpoint, also of one that is hidden for a moment."""
    return step_folder(folder.parent, step_of(folder)).name


def find(
    checkpoints: Path, name: str = "", *, remedy: str = RESUME, contents: bool = True
) -> Path | None:
    """Return the checkpoint of that name; without a name the newest, or None if there is none.

    Raises RLHFError if it is missing or damaged: the user decides which older one to take, and
    `remedy` says how. `contents` is as in `damage`.
    """
    folders = all_checkpoints(checkpoints)
    if not folders and not name:
        return None
    number = re.fullmatch(r"step-(\d+)", name)
    matching = (path for path in folders if number and step_of(path) == int(number[1]))
    folder = next(matching, None) if name else folders[-1]
    if folder is None:
        available = ", ".join(map(name_of, folders)) or "none"
        raise RLHFError(f"no checkpoint {name!r} in {checkpoints}; available: {available}")
    if problem := damage(folder, contents=contents):
        what = f"checkpoint {name_of(folder)}" if name else "the newest checkpoint"
        older = reversed(folders[: folders.index(folder)])
        intact = next((each for each in older if damage(each) is None), None)
        advice = "no older one is intact; start again with --overwrite"
        if intact is not None:
            advice = remedy.replace("{}", name_of(intact))
        raise RLHFError(f"{what} is damaged: {problem}; {advice}")
    if json.loads((folder / MANIFEST).read_text(encoding="utf-8")).get("format") != FORMAT:
        raise RLHFError(
            f"{folder} has the format of another version of rlhf; export its weights with the "
            "version that wrote it (rlhf export) and start from them"
        )
    return folder


def damage(folder: Path, *, contents: bool = True) -> str | None:
    """Return how a checkpoint differs from its manifest, or None if it does not. Without `contents`
    only names and sizes are compared, which reads none of the files."""
    try:
        files = dict(json.loads((folder / MANIFEST).read_text(encoding="utf-8"))["files"])
        sizes = {name: int(file["size"]) for name, file in files.items()}
        expected = {name: file["sha256"] for name, file in files.items()}
    except FileNotFoundError:
        return f"{folder} has no {MANIFEST}"
    except (OSError, ValueError, KeyError, TypeError, OverflowError, RecursionError):
        return f"{folder / MANIFEST} cannot be read"
    for name, size in sizes.items():
        path = folder / name
        if not path.is_file():
            return f"{path} is missing"
        if path.stat().st_size != size:
            return f"{path} has {path.stat().st_size} bytes instead of {size}"
    if not contents:
        return None
    digests = in_threads(sha256, [folder / name for name in expected])
    pairs = zip(expected, digests, strict=True)
    changed = [name for name, current in pairs if current != expected[name]]
    return f"{folder / changed[0]} has changed since it was written" if changed else None


def _describe(path: Path) -> dict[str, object]:
    _sync(path)
    return {"size": path.stat().st_size, "sha256": sha256(path)}


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
