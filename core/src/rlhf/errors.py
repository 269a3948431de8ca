"""Errors that a user can fix: what is wrong, where, and what to do."""

import difflib
from collections.abc import Iterable, Sequence

CLOSE = 0.65
"""Least similarity (difflib's ratio) of a known name that an error suggests."""


class RLHFError(Exception):
    """A mistake that the user can fix, in one sentence; the command line exits with 2."""


class SameOnAllRanks(RLHFError):
    """An error that all ranks raise alike, so that only rank 0 prints it."""


class RanksFailed(Exception):
    """Ranks of this run have failed with this exit code, and have printed why."""

    def __init__(self, code: int, problem: str) -> None:
        super().__init__(problem)
        self.code = code


class Place(str):
    """A note on the error of a plugin's own code: which of its methods failed, and where."""


def place_of(error: BaseException) -> str:
    """Return the place in the notes of an error; "" without one."""
    notes = getattr(error, "__notes__", ())
    return next((str(note) for note in notes if isinstance(note, Place)), "")


def nearest(name: str, names: Iterable[str]) -> str | None:
    """Return the known name that `name` probably means; None if none is similar enough."""
    return next(iter(difflib.get_close_matches(name, list(names), n=1, cutoff=CLOSE)), None)


def counted(count: int, noun: str) -> str:
    """Return a number with its noun, as in `1 row` and `2,000 rows`."""
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"


def listed(names: Sequence[str]) -> str:
    """Return up to four names, as in `a and b` and `a, b, c and 6 others`."""
    shown = [*names] if len(names) <= 4 else [*names[:3], f"{len(names) - 3:,} others"]
    return " and ".join(filter(None, [", ".join(shown[:-1]), *shown[-1:]]))


def text_of(error: BaseException) -> str:
    """Return an exception's text; its type's name if its own code fails to make one."""
    try:
        return str(error)
    except Exception:
        return type(error).__name__


def first_line(error: BaseException) -> str:
    """Return the first line of an exception's text, cut at 200 characters unless it is an
    RLHFError; its type's name if it has no text. A line that ends with a colon introduces the next
    one, which is added to it."""
    lines = [line.strip() for line in text_of(error).splitlines() if line.strip()]
    if not lines:
        return type(error).__name__
    line = " ".join(lines[: 1 + lines[0].endswith(":")]).rstrip(".")
    return line if isinstance(error, RLHFError) else line[:200]
