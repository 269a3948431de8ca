"""Errors that a user can fix: what is wrong, where, and what to do."""


class RLHFError(Exception):
    """A mistake that the user can fix, in one sentence; the command line exits with 2."""


class SameOnAllRanks(RLHFError):
    """An error that all ranks raise alike, so that only rank 0 prints it."""


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message, cut to 200 characters; the name of its type if
    it has no message."""
    return (str(error).strip() or type(error).__name__).splitlines()[0][:200]
