"""What runs share if a script starts several in one process, one after another or in threads.

`rlhf.api.run` promises that environment variables are afterwards what they were before: a notebook
or a sweep calls it many times. The runs of a process share its imports: one of two steps takes
0.21 s of CPU time in a process that has had others (benchmarks/NOTES.md, Collections in a process
of many runs).
"""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Lock

from rlhf.errors import RLHFError

_RANK, _RUNS = Lock(), Lock()
"""Held by the run whose rank is this process, and while a run begins or ends."""
_before: list[tuple[dict[str, str], str | None, bool]] = []
"""What each run in progress restores: the same for all, what was before the first."""


@contextmanager
def only_rank() -> Iterator[None]:
    """Let this process be a rank of one run at a time. Raises RLHFError if it is one already."""
    if not _RANK.acquire(blocking=False):
        raise RLHFError(
            "another run is in progress in this process; wait for it, or run this one with "
            "nproc=2 or in another process"
        )
    try:
        yield
    finally:
        _RANK.release()


@contextmanager
def same_environment() -> Iterator[None]:
    """Undo what a run does to the environment variables, and to where Python keeps bytecode, when
    the last run in progress ends."""
    with _RUNS:
        now = (dict(os.environ), sys.pycache_prefix, sys.dont_write_bytecode)
        _before.append(_before[0] if _before else now)
    try:
        yield
    finally:
        with _RUNS:
            before, prefix, without = _before.pop()
            if not _before:
                sys.pycache_prefix, sys.dont_write_bytecode = prefix, without
                for name in os.environ.keys() - before.keys():
                    del os.environ[name]
                os.environ.update(before)
