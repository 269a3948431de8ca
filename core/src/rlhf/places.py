"""Places that a user names and we write to: what the system refuses is told with its reason, and a
folder is there whole or not at all."""

import errno
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rlhf.errors import RLHFError

FULL = {errno.ENOSPC, errno.EDQUOT}
REFUSED = {
    errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.EEXIST, errno.EISDIR,
    errno.ENAMETOOLONG, errno.EIO,
}  # fmt: skip
SIGNS = ("No space left on device", "PytorchStreamWriter failed", "unexpected pos")
"""What safetensors and torch say of a full disk, with no number of an error."""


@contextmanager
def writing(place: Path) -> Iterator[None]:
    """RLHFError with the place and the reason where the system refuses to write in this block."""
    try:
        yield
    except RLHFError:
        raise
    except Exception as error:
        told = _refusal(error, place)
        if told is None:
            raise
        raise RLHFError(told) from error


@contextmanager
def new_folder(target: Path) -> Iterator[Path]:
    """A hidden folder beside `target` to write into, which gets its name when the block has ended
    well. RLHFError where `target` is anything but an empty folder."""
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        what = "is not empty" if target.is_dir() else "is a file"
        raise RLHFError(f"{target} {what}: give a new folder")
    part = target.absolute().with_name(f".{target.absolute().name}.part")
    with writing(target):
        try:
            shutil.rmtree(part, ignore_errors=True)
            part.mkdir(parents=True)
            yield part
            part.rename(target)
        finally:
            shutil.rmtree(part, ignore_errors=True)


def write_whole(path: Path, text: str) -> None:
    """Replace a file by `text` so that a kill leaves the old one or the new one."""
    part = path.with_name(f".{path.name}.part")
    part.write_text(text)
    part.replace(path)


def _refusal(error: BaseException | None, place: Path) -> str | None:
    """What was refused, by the error or one behind it; None for any other error: a defect."""
    while error is not None:
        number = error.errno if isinstance(error, OSError) else None
        if number in FULL or any(sign in str(error) for sign in SIGNS):
            return f"{place} cannot be written, the disk is full: free some space and start again"
        if isinstance(error, OSError) and number in REFUSED:
            where = error.filename or place
            return f"{where} cannot be used ({error.strerror}): give another place"
        error = error.__cause__ or error.__context__
    return None
