"""Where the time goes from the start of a run to the end of its first step, on each rank."""

import time
from collections.abc import Iterator
from contextlib import contextmanager


class Startup:
    """A clock for the parts of a run's start. The time of a part within another one counts once."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        """Of each part that has ended, in the order in which they began."""
        self._current, self._since = "set-up", time.perf_counter()

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
