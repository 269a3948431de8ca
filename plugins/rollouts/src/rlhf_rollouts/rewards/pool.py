"""Workers that call functions of the user: rewards and tools. One that does not return before its
deadline is killed."""

import json
import os
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Generator, Mapping, Sequence
from contextlib import suppress
from multiprocessing.connection import Pipe, wait
from typing import Any

from rlhf.errors import RLHFError
from rlhf_rollouts.rewards.functions import CALL, Outcome

PROGRAM = """
import json, sys
sys.path[:] = json.loads(sys.argv[3])
from importlib import import_module
import_module(sys.argv[4]).serve(int(sys.argv[1]), int(sys.argv[2]))
"""
START_SECONDS = 120.0
"""Time in which a worker has to import the modules of all functions."""
GRACE = 1.0
"""Seconds after the deadline in which a worker may still say that its calls are late."""
Source = tuple[str, str, Mapping[str, Any]]
"""A function: the name of its reward or tool, its path and its options."""
Task = tuple[Sequence[Any], float]
"""Calls that one worker gets together, and their deadline in seconds."""


class Worker:
    """A process with the functions loaded. It is started again after it has ended."""

    def __init__(self, sources: Sequence[Source], *, kind: str) -> None:
        """`kind` is the package of ours whose module `worker` calls them: rewards or tools."""
        self.sources, self.kind = sources, kind
        self.start()

    def start(self) -> None:
        """Start the process. Raises RLHFError if it cannot load a function."""
        self.connection, theirs = Pipe()
        arguments = [str(theirs.fileno()), str(os.getpid()), json.dumps(sys.path)]
        arguments.append(f"rlhf_rollouts.{self.kind}.worker")
        # In a session of its own, it does not get Ctrl-C, and what it starts is killed with it.
        self.process = subprocess.Popen(
            [sys.executable, "-u", "-c", PROGRAM, *arguments],
            pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL, start_new_session=True,
        )  # fmt: skip
        theirs.close()
        self.connection.send(self.sources)
        self.loaded: Sequence[tuple[bool, Sequence[str]]]
        """Of each function, whether it is asynchronous, and the columns that it needs."""
        names = ", ".join(name for name, _, _ in self.sources)
        problem = f"{self.kind} {names}: not imported in {START_SECONDS:g} s; shorten the import"
        try:
            if self.connection.poll(START_SECONDS):
                problem, self.loaded = self.connection.recv()
        except (EOFError, ConnectionResetError):
            problem = f"{self.kind} {names}: {self.how_ended()} at the import; correct the module"
        if problem:
            self.kill()
            raise RLHFError(problem)

    def send(self, task: Task, state: Mapping[str, Any]) -> None:
        """Give the process a task."""
        if self.process.poll() is not None:
            self.start()
        self.connection.send((*task, state))

    def outcomes(self, task: Task) -> list[Any]:
        """Return the outcomes of a task whose result has come, or whose process has ended."""
        try:
            return list(self.connection.recv())
        except (EOFError, ConnectionResetError):
            text = f"{self.how_ended()} in a call for {CALL}; correct the function"
            return [Outcome(kind="failed", text=text) for _ in task[0]]

    def how_ended(self) -> str:
        """Return in words how the process has ended."""
        code = self.process.wait()
        self.kill_group()
        how = signal.Signals(-code).name if code < 0 else f"exit code {code}"
        full = ", perhaps because the memory of the host is full," if how == "SIGKILL" else ""
        return f"its process ended with {how}{full}"

    def kill(self) -> None:
        """End the process, and those that its functions have started."""
        self.connection.close()
        self.kill_group()
        self.process.wait()

    def kill_group(self) -> None:
        """End what is left of the process and of those that it has started."""
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)


class Pool:
    """Workers that all have the same functions."""

    def __init__(self, sources: Sequence[Source], *, workers: int, kind: str = "rewards") -> None:
        self.workers = [Worker(sources, kind=kind) for _ in range(workers if sources else 0)]
        self.loaded = self.workers[0].loaded if sources else ()

    def outcomes(
        self, waiting: Sequence[deque[Task]], state: Mapping[str, Any]
    ) -> Generator[tuple[Any, Any]]:
        """Yield the outcome of each call of all tasks, in any order: those that wait for each
        worker, which may be the same for all. The caller may append tasks until the last
        outcome."""
        busy: dict[Worker, tuple[Task, float]] = {}
        try:
            while any(waiting) or busy:
                for worker, tasks in zip(self.workers, waiting, strict=True):
                    if tasks and worker not in busy:
                        task = tasks.popleft()
                        worker.send(task, state)
                        busy[worker] = task, time.monotonic() + task[1] + GRACE
                due = min(due for _, due in busy.values())
                running = [worker.connection for worker in busy]
                ready = wait(running, max(0.0, due - time.monotonic()))
                for worker, (task, due) in [*busy.items()]:
                    if worker.connection in ready:
                        outcomes = worker.outcomes(task)
                    elif time.monotonic() >= due:
                        worker.kill()
                        outcomes = [Outcome(kind="late") for _ in task[0]]
                    else:
                        continue
                    del busy[worker]
                    yield from zip(task[0], outcomes, strict=True)
        finally:
            # After an error, what still runs is of no use.
            for worker in busy:
                worker.kill()

    def close(self) -> None:
        """End all workers."""
        for worker in self.workers:
            worker.kill()
