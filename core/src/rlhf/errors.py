"""The one error that a user can mend: what is wrong, where, and what to do."""


class RLHFError(Exception):
    """A user's mistake, told in one sentence with the values; the command line exits with 2."""


class ToldByFirst(RLHFError):
    """An error that every rank has alike, so that rank 0's telling of it is enough."""
