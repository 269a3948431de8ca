"""Checkpoints on disk: a folder is complete or absent, and says so itself in a manifest.

A checkpoint is written to a hidden folder, synced, given its manifest (size and SHA-256 of every
file) and renamed. The newest one is found by looking, never by a pointer that can lie; older ones
go only afterwards.
"""

import json
import os
import re
import shutil
from collections.abc import Iterable
from pathlib import Path

from rlhf.errors import RLHFError
from rlhf.folder.disk import sha256

MANIFEST = "manifest.json"
ASIDE = ".{}.aside"
"""What a checkpoint is called that the run has gone back behind."""
REPLACED = ".{}.replaced"
"""What a checkpoint is called for the moment in which another of its step takes its name; after a
kill in that moment it is still that step's."""
RESUME = "go on from the one before with --resume {}"
NAME = re.compile(r"step-(\d{6,})$|\.step-(\d{6,})\.replaced$")


def step_folder(checkpoints: Path, step: int) -> Path:
    """Where the checkpoint of `step` stands once it is whole."""
    return checkpoints / f"step-{step:06d}"


def part_folder(checkpoints: Path, step: int) -> Path:
    """Where it is written until then."""
    return checkpoints / f".step-{step:06d}.part"


def begin(checkpoints: Path, step: int) -> Path:
    """An empty hidden folder to write the checkpoint of `step` into; left-overs of a killed save
    go."""
    checkpoints.mkdir(parents=True, exist_ok=True)
    folder = part_folder(checkpoints, step)
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    return folder


def digest(folder: Path, *, share: int = 0, of: int = 1) -> dict[str, dict[str, object]]:
    """Size and SHA-256 of the files below `folder`, each synced to disk; `share` of `of` ranks does
    its part."""
    paths = sorted(path for path in folder.rglob("*") if path.is_file() and path.name != MANIFEST)
    return {str(path.relative_to(folder)): _describe(path) for path in paths[share::of]}


def commit(part: Path, checkpoints: Path, step: int, files: dict[str, dict[str, object]]) -> Path:
    """Give the folder its manifest and its name, in this order. Returns where it stands now."""
    manifest = part / MANIFEST
    manifest.write_text(json.dumps({"step": step, "files": files}, indent=1, sort_keys=True))
    _sync(manifest)
    for folder in [*(path for path in part.rglob("*") if path.is_dir()), part]:
        _sync(folder)
    target = step_folder(checkpoints, step)
    replaced = checkpoints / REPLACED.format(target.name)
    if target.exists():
        shutil.rmtree(replaced, ignore_errors=True)
        target.rename(replaced)
    part.rename(target)
    _sync(checkpoints)
    shutil.rmtree(replaced, ignore_errors=True)
    return target


def set_aside(checkpoints: Path, *, after: int) -> list[str]:
    """Take the checkpoints after that step out of the count: the run has gone back behind them.
    They go with the next rotation, when a new one is whole. Returns their names."""
    later = [folder for folder in all_checkpoints(checkpoints) if step_of(folder) > after]
    names = [name_of(folder) for folder in later]
    for folder, name in zip(later, names, strict=True):
        aside = checkpoints / ASIDE.format(name)
        shutil.rmtree(aside, ignore_errors=True)
        folder.rename(aside)
    return names


def rotate(checkpoints: Path, *, keep: int, spare: int | None = None) -> None:
    """Remove all but the newest `keep` checkpoints and that of the step `spare`, and what was set
    aside. Folders of other names are never touched."""
    for folder in checkpoints.glob(ASIDE.format("step-*")):
        shutil.rmtree(folder)
    for folder in checkpoints.glob(REPLACED.format("step-*")):
        if step_folder(checkpoints, step_of(folder)).exists():
            shutil.rmtree(folder)
    for folder in all_checkpoints(checkpoints)[:-keep]:
        if step_of(folder) == spare:
            continue
        # The manifest goes first: what a kill leaves half removed is no checkpoint any more.
        (folder / MANIFEST).unlink(missing_ok=True)
        shutil.rmtree(folder)


def all_checkpoints(checkpoints: Path) -> list[Path]:
    """The folders named like a checkpoint, oldest first, whole or not."""
    if not checkpoints.is_dir():
        return []
    found = [path for path in checkpoints.iterdir() if NAME.match(path.name) and path.is_dir()]
    # Of two of one step the hidden one comes first here, and has been replaced.
    by_step = {step_of(path): path for path in sorted(found)}
    return [by_step[step] for step in sorted(by_step)]


def step_of(folder: Path) -> int:
    """The step in a checkpoint's name."""
    match = NAME.match(folder.name)
    if match is None:
        raise RLHFError(f"{folder} is not named like a checkpoint: give a folder step-NNNNNN")
    return int(match[1] or match[2])


def name_of(folder: Path) -> str:
    """What a checkpoint is called, wherever it stands."""
    return step_folder(folder.parent, step_of(folder)).name


def newest(checkpoints: Path, *, instead: str = RESUME) -> Path | None:
    """The newest checkpoint, or None without one. Raises RLHFError when the newest is damaged:
    which older one to take is the user's decision, and `instead` says how."""
    folders = all_checkpoints(checkpoints)
    if not folders:
        return None
    problem = damage(folders[-1])
    if problem is None:
        return folders[-1]
    raise RLHFError(f"the newest checkpoint is damaged: {problem}; {_older(folders[:-1], instead)}")


def named(checkpoints: Path, name: str, *, instead: str = RESUME) -> Path:
    """The checkpoint of that name, whole, or RLHFError."""
    number = re.fullmatch(r"step-(\d+)", name)
    there = all_checkpoints(checkpoints)
    folder = next((path for path in there if number and step_of(path) == int(number[1])), None)
    if folder is None:
        known = ", ".join(map(name_of, there)) or "none"
        raise RLHFError(f"there is no checkpoint {name!r} in {checkpoints}: there are {known}")
    problem = damage(folder)
    if problem is not None:
        older = [path for path in there if step_of(path) < step_of(folder)]
        raise RLHFError(
            f"checkpoint {name_of(folder)} is damaged: {problem}; {_older(older, instead)}"
        )
    return folder


def damage(folder: Path) -> str | None:
    """What is wrong with a checkpoint against its manifest, or None when every byte is as it was
    written."""
    try:
        files = dict(json.loads((folder / MANIFEST).read_text())["files"])
    except FileNotFoundError:
        return f"{folder} has no {MANIFEST}"
    except (OSError, ValueError, KeyError, TypeError):
        return f"{folder / MANIFEST} cannot be read"
    for name, expected in files.items():
        path = folder / name
        if not path.is_file():
            return f"{path} is missing"
        if path.stat().st_size != expected["size"]:
            return f"{path} has {path.stat().st_size} bytes instead of {expected['size']}"
        if sha256(path) != expected["sha256"]:
            return f"{path} has other content than was written"
    return None


def _older(folders: Iterable[Path], instead: str) -> str:
    whole = [name_of(folder) for folder in folders if damage(folder) is None]
    if not whole:
        return "there is no older one: start again with --overwrite"
    return instead.replace("{}", whole[-1])


def _describe(path: Path) -> dict[str, object]:
    _sync(path)
    return {"size": path.stat().st_size, "sha256": sha256(path)}


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
