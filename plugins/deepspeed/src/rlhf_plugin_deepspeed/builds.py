"""Locks of operators that torch compiles: a build that was killed leaves its lock behind, for which
every later one would wait without a word.

No run compiles an operator of DeepSpeed by itself, but an extension or a trainer may, as with
DeepSpeedCPUAdam. torch's lock is an empty file that a build keeps open until it deletes it.
"""

import fcntl
import os
import re
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Literal

from torch.utils.file_baton import FileBaton

from rlhf_plugin_deepspeed.nvme import NETWORK, file_system

SHARED = rf"{NETWORK}|virtiofs|vboxsf|afs|gfs2|ocfs2"
"""File systems on which the owner of a lock may run on another host, or under another kernel."""
PATIENCE = 5.0
"""Seconds that a build waits for another one without a word."""
PAUSE = 0.2


@contextmanager
def watched_builds() -> Iterator[None]:
    """Let builds in this block remove the lock of a build that was killed, and print what they wait
    for."""
    own = FileBaton.try_acquire
    replaced: Any = FileBaton
    replaced.try_acquire = lambda baton: _acquire(baton, own)
    try:
        yield
    finally:
        replaced.try_acquire = own


def owner_of(lock: Path) -> Literal["none", "here", "unknown", "no lock"]:
    """Return where the build that made a lock runs: on this host, or nowhere any more.

    On this host the kernel knows whether any process has the file open, in whichever container: it
    grants a lease for writing only if none has. A compiler whose build was killed still works in
    the folder.
    """
    if not hasattr(fcntl, "F_SETLEASE") or re.fullmatch(SHARED, file_system(lock.parent)):
        return "unknown"
    try:
        file = os.open(lock, os.O_RDONLY)
        try:
            # Who opens the file now would send us a signal that ends this process.
            fcntl.fcntl(file, fcntl.F_SETSIG, signal.SIGURG)
            fcntl.fcntl(file, fcntl.F_SETLEASE, fcntl.F_WRLCK)
        finally:
            os.close(file)
    except FileNotFoundError:
        return "no lock"
    except BlockingIOError:
        return "here"
    except OSError:  # Of another user, or without leases.
        return "unknown"
    return "here" if _has_process(lock.parent) else "none"


def _has_process(folder: Path) -> bool:
    """Return whether a process works in a folder, as the compilers of a build do."""
    for place in Path("/proc").glob("[0-9]*/cwd"):
        with suppress(OSError):  # It has ended, or belongs to another user.
            if place.samefile(folder):
                return True
    return False


def _acquire(baton: Any, own: Any) -> bool:
    """Return True if this process is to build, with the lock; False once another has built."""
    lock, began, has_told = Path(baton.lock_file_path), time.monotonic(), False
    while True:
        with _alone(lock.parent):
            owner = owner_of(lock)
            if owner == "none":
                lock.unlink()
                print(f"operator   removed {lock}, left by a build that was killed", flush=True)
            if own(baton):
                return True
        time.sleep(PAUSE)
        # Else it was deleted as the line below says, and nobody has built.
        if owner == "here" and not lock.exists():
            return False
        waits = time.monotonic() - began > PATIENCE and os.environ.get("LOCAL_RANK", "0") == "0"
        if waits and not has_told:
            has_told = True
            print(f"operator   {explain_wait(lock, owner)}", flush=True)


def explain_wait(lock: Path, owner: str) -> str:
    """Return what a build waits for, and how to end it."""
    if owner == "here":
        return f"waiting for another build in {lock.parent}, which has the lock {lock}"
    return (
        f"waiting for the lock {lock} of another build, perhaps on another host; if none is "
        f"running, one was killed: rm {lock}"
    )


@contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Run this block in one process of the host at a time, so that none removes the lock that
    another has just made in place of an old one."""
    place = os.open(folder, os.O_RDONLY)
    try:
        with suppress(OSError):  # Not all shared file systems have such locks.
            fcntl.flock(place, fcntl.LOCK_EX)
        yield
    finally:
        os.close(place)
