"""The process in which reward functions run. It ends when its pipe is closed or its parent dies."""

import asyncio
import os
import signal
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from rlhf.errors import RLHFError
from rlhf_rollouts.rewards.functions import Call, Function, Log, Outcome, arguments, failed, load

State = Mapping[str, Any]


def serve(descriptor: int, parent: int) -> None:
    """Load the functions that the first message names, then answer calls until the pipe closes."""
    threading.Thread(target=end_with, args=[parent], daemon=True).start()
    # Modules in the current folder can be imported, after all others.
    sys.path.append(str(Path.cwd()))
    connection = Connection(descriptor)
    functions: list[Function] = []
    # One loop for all calls: clients that a function keeps belong to it.
    loop = asyncio.new_event_loop()
    try:
        for name, path, options in connection.recv():
            try:
                functions.append(load(path, options))
            except RLHFError as error:
                connection.send((f"reward {name!r}: {error}", []))
                return
        connection.send(("", [(each.is_async, each.columns) for each in functions]))
        while True:
            calls, seconds, state = connection.recv()
            if functions[calls[0].function].is_async:
                outcomes = loop.run_until_complete(together(calls, functions, seconds, state))
            else:
                outcomes = [score(call, functions[call.function], state) for call in calls]
            connection.send(outcomes)
    except (EOFError, BrokenPipeError):
        pass


def end_with(parent: int) -> None:
    """End this process when its parent has died, also while a function hangs."""
    while os.getppid() == parent:
        time.sleep(1.0)
    os.killpg(0, signal.SIGKILL)  # With what the functions have started.


def score(call: Call, function: Function, state: State) -> Outcome:
    """Return the outcome of a call."""
    log = Log(len(call.completions))
    try:
        return log.outcome(function.call(**arguments(call, function, state, log)))
    except BaseException as error:  # The function may raise anything, SystemExit too.
        return failed(error)


async def together(
    calls: Sequence[Call], functions: Sequence[Function], seconds: float, state: State
) -> list[Outcome]:
    """Return the outcomes of asynchronous calls, which run at the same time."""
    each = (awaited(call, functions[call.function], seconds, state) for call in calls)
    return await asyncio.gather(*each)


async def awaited(call: Call, function: Function, seconds: float, state: State) -> Outcome:
    """Return the outcome of an asynchronous call, which is cancelled after `seconds`."""
    log, limit = Log(len(call.completions)), asyncio.timeout(seconds)
    try:
        async with limit:
            return log.outcome(await function.call(**arguments(call, function, state, log)))
    except BaseException as error:
        return Outcome(kind="late") if limit.expired() else failed(error)
