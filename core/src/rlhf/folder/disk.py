"""Writing to disk: refusals of the system become errors with place and reason, and a file or a
folder that a user has named is complete or absent."""

import errno
import hashlib
import os
import re
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from rlhf.errors import RLHFError

FULL = {errno.ENOSPC, errno.EDQUOT}
REFUSED = {
    errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.EEXIST, errno.EISDIR,
    errno.ENAMETOOLONG, errno.EIO, errno.ELOOP, errno.EFBIG, errno.EBUSY, errno.EXDEV,
}  # fmt: skip
"""What counts without the name of a file, too."""
SIGNS = ("No space left on device", "PytorchStreamWriter failed", "unexpected pos")
"""What torch says about a full disk, instead of an error number."""
SAFETENSORS = re.compile(r"while serializing: .*\(os error (\d+)\)")
"""What safetensors says about an error of the system."""
SPEED_BLOCK, SPEED_SECONDS = 2**20, 1.0
SHARED_MEMORY = re.compile(r"/dev/shm|</torch_|nccl", re.IGNORECASE)
"""Signs that shared memory is full and not a disk: segments of NCCL."""


@contextmanager
def writing(place: Path) -> Iterator[None]:
    """Raise RLHFError with place and reason if the system refuses to write in this block."""
    try:
        yield
    except RLHFError:
        raise
    except Exception as error:
        message = _refusal(error, place)
        if message is None:
            raise
        raise RLHFError(message) from error


@contextmanager
def new_folder(target: Path, *, replace: bool = False) -> Iterator[Path]:
    """Yield a hidden folder next to `target`, which is renamed to it if the block succeeds. Raises
    RLHFError if `target` exists and is not an empty folder, unless it may `replace` it."""
    check_path(target)
    with writing(target):
        if not replace:
            _check_free(target)
        part = part_of(target)
        try:
            shutil.rmtree(part, ignore_errors=True)
            part.mkdir(parents=True)
            yield part
            if replace:
                shutil.rmtree(target, ignore_errors=True)
            part.rename(target)
        finally:
            shutil.rmtree(part, ignore_errors=True)


def _check_free(target: Path) -> None:
    """Raise RLHFError unless a folder can be renamed to `target`: now, and not after it is
    written."""
    if target.is_symlink():
        raise RLHFError(f"{target} is a link; choose a new folder")
    if not target.exists():
        return
    if not target.is_dir() or any(target.iterdir()):
        what = "is not empty" if target.is_dir() else "is a file"
        raise RLHFError(f"{target} {what}; choose a new folder")
    if target.is_mount() or target.samefile(Path()):
        what = "a mount point" if target.is_mount() else "the current folder"
        raise RLHFError(f"{target} is {what}, which cannot be replaced; choose a new folder in it")


def write_file(target: Path, text: str, *, replace: bool = False) -> None:
    """Write a file, with the folders above it; if that fails, what was there remains. Raises
    RLHFError if the system refuses, and if `target` exists unless it may `replace` it."""
    check_path(target)
    with writing(target):
        if target.exists() and not replace:
            raise RLHFError(f"{target} exists; choose another file")
        if target.exists() and not target.is_file():  # Such as /dev/stdout.
            target.write_text(text, encoding="utf-8")
            return
        if target.is_symlink():
            target.stat()  # Raises for a broken link.
            target = target.resolve()  # It is replaced, and not the link.
    with new_file(target) as part:
        part.write_text(text, encoding="utf-8")


def check_path(path: Path) -> None:
    """Raise RLHFError for an address such as s3://bucket, and for a path that is not UTF-8."""
    if path.parts[1:] and path.parts[0].endswith(":"):
        raise RLHFError(
            f"cannot write to {path.parts[0]}//; choose a local path (buckets: docs/observers.md)"
        )
    if "\0" in str(path):
        raise RLHFError(f"the path {str(path)!a} contains the character NUL; choose another")
    try:
        os.fspath(path.absolute()).encode()
    except UnicodeEncodeError as error:
        raise RLHFError(f"the path {str(path)!a} is not UTF-8; choose another") from error


def part_of(target: Path) -> Path:
    """Return the hidden path at which `target` is written."""
    whole = target.absolute()
    return whole.parent / f".{whole.name}.part"


@contextmanager
def new_file(target: Path) -> Iterator[Path]:
    """Yield a hidden path next to `target`, which becomes it if the block succeeds; the folders
    above it are made. Raises RLHFError if the system refuses."""
    with writing(target):
        target.parent.mkdir(parents=True, exist_ok=True)
        with _replacing(target) as part:
            yield part


def write_whole(path: Path, text: str) -> None:
    """Replace a file by `text`."""
    with _replacing(path) as part:
        part.write_text(text, encoding="utf-8")


@contextmanager
def _replacing(path: Path) -> Iterator[Path]:
    """Yield a hidden path next to a file, which replaces it if the block succeeds; a kill or a full
    disk leaves either the old file or the new one."""
    part = part_of(path)
    try:
        yield part
        part.replace(path)
    except BaseException:
        with suppress(OSError):
            part.unlink()
        raise


def free_space(folder: Path) -> int:
    """Return the bytes that are free where `folder` is, or will be."""
    return shutil.disk_usage(existing(folder)).free


def write_speed(folder: Path) -> float:
    """Return the bytes per second at which a file of up to 256 MiB is written and flushed to the
    disk of `folder`, in about a second. Raises RLHFError if the folder cannot be written."""
    block, start, place = os.urandom(SPEED_BLOCK), time.perf_counter(), existing(folder)
    with writing(place), tempfile.TemporaryFile(dir=place) as file:
        for number in range(1, 257):
            file.write(block)
            if number % 16 == 0:
                file.flush()
                os.fsync(file.fileno())
                if time.perf_counter() - start > SPEED_SECONDS:
                    break
        return number * SPEED_BLOCK / (time.perf_counter() - start)


def existing(folder: Path) -> Path:
    """Return the folder, or the nearest above it that exists."""
    return next(path for path in (folder.absolute(), *folder.absolute().parents) if path.exists())


def sha256(path: Path) -> str:
    """Return the SHA-256 of a file's bytes, in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _refusal(error: BaseException, place: Path) -> str | None:
    """Return a message if the system refused to write, or None for any other error, a defect.

    torch reports a full disk while it handles the system's error, so errors in the context count
    for that case. A refusal counts only if the error was raised from it, and not for a file outside
    of `place`, which may have been read.
    """
    chain, following = [error], error
    while following := following.__cause__ or following.__context__:  # type: ignore[assignment]
        chain.append(following)
    for one in chain:
        if SHARED_MEMORY.search(str(one)) and "No space left" in str(one):
            return "shared memory /dev/shm is full; enlarge it (docker --shm-size)"
        if _number(one) in FULL or any(sign in str(one) for sign in SIGNS):
            where = _where(one, place)
            return f"cannot write to {where}: the disk is full; free some space and start again"
    source: BaseException | None = error
    while source is not None:
        number, file = _number(source), getattr(source, "filename", None)
        if _is_refusal(number, file, place):
            text = getattr(source, "strerror", None) or os.strerror(number)
            return f"cannot write to {_where(source, place)} ({text}); choose another location"
        source = source.__cause__
    return None


def _where(error: BaseException, place: Path) -> object:
    """Return the path that an error names; `place`, if it names none or the hidden path at which
    `place` is written."""
    file = getattr(error, "filename", None)
    if not file or (isinstance(file, str) and Path(file).is_relative_to(part_of(place))):
        return place
    return file


def _number(error: BaseException) -> int:
    """Return the system's number of an error of Python or of safetensors; 0 if it has none."""
    said = SAFETENSORS.search(str(error))
    return int(said[1]) if said else getattr(error, "errno", None) or 0


def _is_refusal(number: int, filename: object, place: Path) -> bool:
    """Return whether an error means that `place` cannot be written. It may name no file, or a file
    in `place`, in the hidden path at which `place` is written, or above them, where a file system
    may refuse with any number. A missing file counts only for these two and above them: a file
    system such as /proc has not created it."""
    if not number:
        return False
    if not isinstance(filename, str | os.PathLike) or not os.fspath(filename):
        return number in REFUSED
    file, places = Path(filename).absolute(), (place.absolute(), part_of(place))
    if any(each.is_relative_to(file) for each in places):
        return number != errno.ENOENT or not file.exists()
    return number != errno.ENOENT and any(file.is_relative_to(each) for each in places)
