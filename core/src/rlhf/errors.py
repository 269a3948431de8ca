"""The error that a user can mend: what is wrong, where, and what to do."""


class RLHFError(Exception):
    """A user's mistake in one sentence with the values; the command line exits with 2."""


class SameOnAllRanks(RLHFError):
    """An error that every rank raises alike, so that only rank 0 prints it."""


def first_line(error: BaseException) -> str:
    """Return the first line of an exception's text, at most 200 characters; its type's name if it
    has no text."""
    return (str(error).strip() or type(error).__name__).splitlines()[0][:200]
