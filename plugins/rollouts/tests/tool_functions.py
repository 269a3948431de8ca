"""Tools and environments for tests."""

import asyncio
import os
import signal
import time
from collections.abc import Callable


def add(a: int, b: int) -> int:
    """Add two numbers.

    Args:
        a: The first number.
        b: The second number.
    """
    return a + b


def fail(a: int) -> int:
    """Always fail.

    Args:
        a: A number.
    """
    raise ValueError(f"{a} is no good")


def hang(seconds: int) -> str:
    """Wait.

    Args:
        seconds: For how long.
    """
    time.sleep(seconds)
    return "awake"


def leave() -> None:
    """End the process."""
    os._exit(3)


def listed(a: int) -> list[int]:
    """Return a list.

    Args:
        a: Its only number.
    """
    return [a]


def half() -> str:
    """Return half a surrogate pair."""
    return "\ud800"


async def slow(seconds: int) -> str:
    """Wait, asynchronously.

    Args:
        seconds: For how long.
    """
    await asyncio.sleep(seconds)
    return "rested"


def nameless(a):  # type: ignore[no-untyped-def]
    """Have no type hints.

    Args:
        a: A number.
    """


class Counter:
    """Counts up from a number of the row; the reward is the count."""

    def reset(self, start: int = 0, **row: object) -> str | None:
        self.count = start
        return f" It starts at {start}." if start else None

    def get_reward(self) -> float:
        return float(self.count)

    def step(self, by: int) -> str:
        """Count.

        Args:
            by: How far.
        """
        self.count += by
        return f"at {self.count}"

    def stay(self, seconds: int) -> str:
        """Wait.

        Args:
            seconds: For how long.
        """
        time.sleep(seconds)
        return "stayed"

    def freeze(self, seconds: int) -> str:
        """Wait, as code that is not Python would.

        Args:
            seconds: For how long.
        """
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGALRM])
        time.sleep(seconds)
        return "frozen"

    def _hidden(self) -> None:
        """No tool."""


class Different(Counter):
    """Begins otherwise each time."""

    begun = 0

    def reset(self, **row: object) -> str:
        Different.begun += 1
        return f"number {Different.begun}"


class Broken(Counter):
    def get_reward(self) -> float:
        raise KeyError("nothing")


class Pensive(Counter):
    def get_reward(self) -> float:
        time.sleep(60)
        return 1.0


def decorated(method: Callable[..., str]) -> Callable[..., str]:
    def wrapper(self, by: int) -> str:  # type: ignore[no-untyped-def]
        """Count.

        Args:
            by: How far.
        """
        return method(self, by)

    return wrapper


class Decorated(Counter):
    step = decorated(Counter.step)  # type: ignore[assignment]


def leaver() -> Counter:
    raise SystemExit("no")


class Endless:
    """Has no reset."""

    def step(self) -> None:
        """Count."""


MEETINGS: dict[int, asyncio.Barrier] = {}


async def meet(number: int) -> str:
    """Wait until so many calls are made.

    Args:
        number: How many.
    """
    await MEETINGS.setdefault(number, asyncio.Barrier(number)).wait()
    return "met"


async def stall(seconds: int) -> str:
    """Wait, and let nothing else run.

    Args:
        seconds: For how long.
    """
    time.sleep(seconds)
    return "stalled"


class Diary:
    """Notes of two answers, which are written at the same time."""

    async def reset(self, **row: object) -> None:
        await meet(2)
        self.notes = ""

    async def note(self, text: str) -> str:
        """Write a note.

        Args:
            text: What to write.
        """
        before, _ = self.notes, await meet(2)
        self.notes = before + text
        return self.notes

    def clear(self) -> None:
        """Forget the notes."""
        self.notes = ""

    async def get_reward(self) -> float:
        await meet(2)
        return float(len(self.notes))


class Unprintable(Exception):
    """An exception whose text cannot be made."""

    def __str__(self) -> str:
        raise TypeError("no text")


def unprintable() -> None:
    """Raise what cannot be printed."""
    raise Unprintable
