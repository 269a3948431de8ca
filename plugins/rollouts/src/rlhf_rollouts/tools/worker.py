"""The process in which tools run. It ends when its pipe is closed or its parent dies."""

import asyncio
import inspect
import math
import signal
import sys
import threading
import types
from collections.abc import Awaitable, Generator, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Literal

from attrs import field, frozen

from rlhf.errors import RLHFError, text_of
from rlhf_rollouts.rewards.functions import described, number, shown
from rlhf_rollouts.rewards.worker import end_with
from rlhf_rollouts.settings import Tools
from rlhf_rollouts.tools.loading import GET_REWARD, RESET, Loaded, load


@frozen(eq=False)
class Call:
    """A call of a function, or of the environment of an answer."""

    answer: int
    """The number of the answer in the rollout."""
    name: str
    arguments: dict[str, Any] = field(factory=dict)
    of_environment: bool = False


@frozen(kw_only=True)
class Result:
    """What a call has returned, or why it has not."""

    kind: Literal["returned", "failed", "lost"] = "returned"
    """lost: the environment of the answer does not exist any more."""
    value: Any = None
    text: str = ""
    """What it has raised, as the policy reads it."""
    reason: str = ""
    """The same for a person, with the place in the code."""


class LateError(BaseException):
    """A call did not return in time. Not an Exception, so that tools do not catch it."""


def serve(descriptor: int, parent: int) -> None:
    """Load the tools that the first message names, then answer calls until the pipe closes."""
    threading.Thread(target=end_with, args=[parent], daemon=True).start()
    # Modules in the current folder can be imported, after all others.
    sys.path.append(str(Path.cwd()))
    connection = Connection(descriptor)
    try:
        ((_, _, options),) = connection.recv()
        settings = Tools(**options)
        try:
            loaded = load(settings)
        except RLHFError as error:
            connection.send((str(error), []))
            return
        connection.send(("", []))
        desk = Desk(loaded, settings.deadline)
        while True:
            calls, _, _ = connection.recv()
            connection.send(desk.results(calls))
    except (EOFError, BrokenPipeError):
        pass


class Desk:
    """Answers calls, each of which is late after `seconds`."""

    def __init__(self, loaded: Loaded, seconds: float) -> None:
        self._loaded, self._seconds = loaded, seconds
        self._environments: dict[int, Any] = {}
        """Those that have been made, by the number of the answer; later rollouts reset them."""
        # One loop for all calls: clients that a tool keeps belong to it.
        self._loop = asyncio.new_event_loop()

    def results(self, calls: Sequence[Call]) -> list[Result]:
        """Return the results of calls. Several calls are all of asynchronous tools, and run at the
        same time, except that those of an environment run one after the other."""
        if len(calls) == 1:
            return [self._result(calls[0])]
        chains: dict[int, list[Call]] = {}
        for place, call in enumerate(calls):
            key = call.answer if call.of_environment else -1 - place
            chains.setdefault(key, []).append(call)
        found: dict[Call, Result] = {}

        async def make(chain: Sequence[Call]) -> None:
            for call in chain:
                begun = self._begin(call)
                found[call] = begun if isinstance(begun, Result) else await self._end(call, begun)

        async def make_all() -> None:
            await asyncio.gather(*map(make, chains.values()))

        self._loop.run_until_complete(make_all())
        return [found[call] for call in calls]

    def _result(self, call: Call) -> Result:
        # Outside of the loop: a tool that is not asynchronous may run one of its own.
        begun = self._begin(call)
        if isinstance(begun, Result):
            return begun
        return self._loop.run_until_complete(self._end(call, begun))

    def _begin(self, call: Call) -> Result | Awaitable[Any]:
        """Make a call, which is interrupted if it runs Python for too long. Return its result, or
        what is awaited for it."""
        try:
            with limited(self._seconds):
                if call.of_environment and call.name == RESET:
                    self._make(call.answer)
                if call.of_environment and call.answer not in self._environments:
                    return Result(kind="lost")
                value = self._target(call)(**call.arguments)
            if inspect.isawaitable(value):
                return value
            return Result(value=plain(call, value))
        except BaseException as error:  # A tool may raise anything, SystemExit too.
            return self._failure(error)

    async def _end(self, call: Call, value: Awaitable[Any]) -> Result:
        try:
            return Result(value=plain(call, await awaited(value, self._seconds)))
        except BaseException as error:
            return self._failure(error)

    def _failure(self, error: BaseException) -> Result:
        if isinstance(error, LateError):
            return late(self._seconds)
        if isinstance(error, RLHFError):
            return Result(kind="failed", text=str(error), reason=str(error))
        return Result(kind="failed", text=text_of(error), reason=f"raised {described(error)}")

    def _make(self, answer: int) -> None:
        if answer not in self._environments:
            assert self._loaded.make is not None, "only an environment is reset"
            self._environments[answer] = self._loaded.make()

    def _target(self, call: Call) -> Any:
        if call.of_environment:
            return getattr(self._environments[call.answer], call.name)
        return self._loaded.functions[call.name]


@contextmanager
def limited(seconds: float) -> Iterator[None]:
    """Raise LateError in the block after `seconds`. Only Python is interrupted."""

    def end(number: int, frame: Any) -> None:
        raise LateError

    signal.signal(signal.SIGALRM, end)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)


async def awaited(value: Awaitable[Any], seconds: float) -> Any:
    """Return what an asynchronous tool returns. Raises LateError after `seconds`."""
    limit = asyncio.timeout(seconds)
    try:
        async with limit:
            return await in_steps(value, seconds)
    except TimeoutError:  # The tool may raise one of its own.
        if limit.expired():
            raise LateError from None
        raise


@types.coroutine
def in_steps(value: Awaitable[Any], seconds: float) -> Generator[Any, Any, Any]:
    """Return what `value` returns. Raises LateError in it if it runs Python for `seconds` without
    awaiting anything: until then nothing else runs in the loop."""
    steps: Any = value.__await__()
    step = partial(next, steps)
    while True:
        try:
            with limited(seconds):
                waited = step()
        except StopIteration as ended:
            return ended.value
        try:
            step = partial(steps.send, (yield waited))
        except BaseException as error:
            step = partial(steps.throw, error)


def late(seconds: float) -> Result:
    """Return the result of a call that did not return in time."""
    text = f"did not return within {seconds:g} s"
    return Result(kind="failed", text=text, reason=text)


def plain(call: Call, value: Any) -> Any:
    """Return what a call has returned as plain data: of a tool as text, of `reset` text or None, of
    `get_reward` a number or None."""
    if not call.of_environment or call.name not in (RESET, GET_REWARD):
        return str(value)
    if call.name == RESET:
        if value is None or isinstance(value, str):
            return value
        raise RLHFError(f"returned {shown(value)}; return text or None")
    if value is None:
        return None
    if not math.isfinite(number(value)):
        raise RLHFError(f"returned {shown(value)}; return a finite number or None")
    return number(value)
