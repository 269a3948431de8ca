"""Places that a user names and we write to: what the system refuses is told with its reason, and a
folder is there whole or not at all."""

import errno
import hashlib
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rlhf.errors import RLHFError

FULL = {errno.ENOSPC, errno.EDQUOT}
REFUSED = {
    errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.EEXIST, errno.EISDIR,
    errno.ENAMETOOLONG, errno.EIO, errno.ELOOP,
}  # fmt: skip
SIGNS = ("No space left on device", "PytorchStreamWriter failed", "unexpected pos")
"""What safetensors and torch say of a full disk, with no number of an error."""
SHARED_MEMORY = re.compile(r"/dev/shm|</torch_|nccl", re.IGNORECASE)
"""What a full disk is called that is none: loaders' and NCCL's segments."""


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
    part = target.absolute().with_name(f".{target.absolute().name}.part")
    with writing(target):
        if target.exists() and (not target.is_dir() or any(target.iterdir())):
            what = "is not empty" if target.is_dir() else "is a file"
            raise RLHFError(f"{target} {what}: give a new folder")
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


def sha256(path: Path) -> str:
    """Return the SHA-256 of a file's bytes, in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _refusal(error: BaseException, place: Path) -> str | None:
    """What was refused, by the error or one that it was raised from; None for any other error: a
    defect, whatever was handled before it. torch tells of a full disk while it handles that."""
    chain, following = [error], error
    while following := following.__cause__ or following.__context__:  # type: ignore[assignment]
        chain.append(following)
    for one in chain:
        if SHARED_MEMORY.search(str(one)) and "No space left" in str(one):
            return (
                "the shared memory /dev/shm is full: give the container more (docker --shm-size), "
                "or set data.workers to 0"
            )
        if getattr(one, "errno", None) in FULL or any(sign in str(one) for sign in SIGNS):
            where = getattr(one, "filename", None) or place
            return f"{where} cannot be written, the disk is full: free some space and start again"
    source: BaseException | None = error
    while source is not None:
        if isinstance(source, OSError) and source.errno in REFUSED:
            where = source.filename or place
            return f"{where} cannot be used ({source.strerror}): give another place"
        source = source.__cause__
    return None
