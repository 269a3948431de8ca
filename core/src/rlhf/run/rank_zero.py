"""What only rank 0 does, with the result or the error on every rank."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

from rlhf.engine import Mesh
from rlhf.errors import RLHFError, SameOnAllRanks
from rlhf.folder.run_folder import RunFolder

T = TypeVar("T")


def on_rank_zero(mesh: Mesh, act: Callable[[], T], *, share: bool = True) -> T:
    """Return the result of `act` on rank 0, on every rank; with `share` False on rank 0 only, and
    None elsewhere. An RLHFError is raised on every rank, so that none waits for one that has ended.
    Collective."""
    value: T | None = None
    error: RLHFError | None = None
    if mesh.rank == 0:
        try:
            value = act()
        except RLHFError as problem:
            error = problem
    shared, message = mesh.gather((value if share else None, error and str(error)))[0]
    if error is not None:
        raise error
    if message is not None:
        raise SameOnAllRanks(message)
    return shared if share else value  # type: ignore[return-value]


@contextmanager
def opened(mesh: Mesh, path: Path, *, fresh: bool) -> Iterator[RunFolder | None]:
    """Lock the run folder: yields it on rank 0, None elsewhere. Collective."""
    folder = on_rank_zero(mesh, lambda: RunFolder(path, fresh=fresh), share=False)
    try:
        yield folder
    finally:
        if folder is not None:
            folder.close()
