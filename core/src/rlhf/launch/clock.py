"""Where the time of a run goes."""

import time
from collections.abc import Iterator
from contextlib import contextmanager


class Clock:
    """Adds up the time of named parts, of which one runs at any time. The time of a part within
    another one counts once."""

    def __init__(self, part: str) -> None:
        """The clock begins with `part`."""
        self.seconds: dict[str, float] = {}
        """Of each part that has ended, in the order in which they ended first."""
        self._current, self._since = part, time.perf_counter()

    def enter(self, part: str) -> str:
        """Begin a part, which ends the one before; returns its name."""
        now, before = time.perf_counter(), self._current
        self.seconds[before] = self.seconds.get(before, 0.0) + now - self._since
        self._current, self._since = part, now
        return before

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Run a part within the present one, which continues afterwards."""
        before = self.enter(name)
        yield
        self.enter(before)
