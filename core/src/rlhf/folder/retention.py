"""Which checkpoints of a run are kept, and whether the disk has room for them."""

import math
import shutil
from pathlib import Path

from rlhf.config.sections import CheckpointConfig
from rlhf.errors import RLHFError
from rlhf.folder.checkpoints import (
    ASIDE,
    MANIFEST,
    NAME,
    REPLACED,
    all_checkpoints,
    remove_unfinished,
    step_folder,
    step_of,
)
from rlhf.folder.disk import free_space

GB = 10**9


def rotate(
    checkpoints: Path, *, keep: int, spare: int | None = None, max_gb: float | None = None
) -> None:
    """Remove what was set aside, and all but the newest `keep` checkpoints, or fewer if they are
    larger than `max_gb` together. The newest and that of step `spare` stay. Folders with other
    names are never touched."""
    _remove_hidden(checkpoints)
    folders = all_checkpoints(checkpoints)[::-1]
    must_stay = [folder for folder in folders if folder in folders[:1] or step_of(folder) == spare]
    room = math.inf if max_gb is None else max_gb * GB - sum(map(_bytes, must_stay))
    for number, folder in enumerate(folders):
        if folder in must_stay:
            continue
        room -= _bytes(folder)
        if number >= keep or room < 0:
            # Without its manifest, a folder that a kill leaves half removed is not a checkpoint.
            (folder / MANIFEST).unlink(missing_ok=True)
            shutil.rmtree(folder)


def _remove_hidden(checkpoints: Path) -> None:
    """Remove the checkpoints that were set aside, and those that others have replaced."""
    for folder in checkpoints.glob(ASIDE.format("step-*")):
        shutil.rmtree(folder)
    for folder in checkpoints.glob(REPLACED.format("step-*")):
        if step_folder(checkpoints, step_of(folder)).exists():
            shutil.rmtree(folder)


def check_disk(folder: Path, size: int) -> int:
    """Return the bytes that are free on the disk of a folder. Raises RLHFError if they are less
    than `size`, those of a checkpoint."""
    free = free_space(folder)
    if free < size:
        raise RLHFError(
            f"{folder} is on a disk with {free / GB:.3g} GB free, but a checkpoint takes "
            f"{size / GB:.3g} GB; free some space or choose another --output"
        )
    return free


def check_room(run: Path, size: int, limits: CheckpointConfig) -> str:
    """Return a warning, or nothing, on the room for checkpoints of `size` bytes in the folder of a
    run, after what killed saves left there is removed. Raises RLHFError if there is none for a
    single one, or a file where a folder has to be."""
    folder = run / "checkpoints"
    for path in (folder, *folder.glob("step-*")):
        if path.is_file() and (path == folder or NAME.match(path.name)):
            raise RLHFError(f"{path} is a file, not a folder; remove it or choose another --output")
    remove_unfinished(folder)
    least = size * (1 if limits.best is None else 2)
    if limits.max_gb is not None and limits.max_gb * GB < least:
        kept = "a checkpoint takes" if limits.best is None else "the newest and the best take"
        raise RLHFError(
            f"checkpoint.max_gb is {limits.max_gb:g} but {kept} {least / GB:.3g} GB; raise it, or "
            "set it to null"
        )
    free = check_disk(run, size) + sum(map(_bytes, all_checkpoints(folder)))
    needed = size * (limits.keep + 1)
    if limits.max_gb is not None:
        needed = min(needed, int(limits.max_gb * GB) + size)
    if free >= needed:
        return ""
    return (
        f"warning    the disk has room for {free // size} checkpoints of {size / GB:.3g} GB, but "
        f"those that are kept and a new one take {needed / GB:.3g} GB"
    )


def _bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
