"""A pool of rank processes for tests: started once, with a gloo group of its own, and given
functions to run.

`pool = ranks_fixture(2)` in a conftest makes the fixture `pool`; `pool.run(function, *arguments)`
runs the function on every rank and returns the results by rank. The workers keep what they have
imported and compiled between runs.
"""

import atexit
import gc
import importlib
import importlib.util
import io
import itertools
import multiprocessing
import os
import pickle
import sys
import tempfile
import time
import traceback
import types
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from functools import partial
from multiprocessing import connection
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from attrs import field, frozen

from rlhf.errors import RLHFError, first_line
from rlhf.launch.local import hold_port

GRACE = 5.0
"""Seconds that the other ranks get once one has failed: most wait in a collective for it."""
START = 300.0
"""Seconds that the workers may take to import torch and find each other."""


class RankFailure(AssertionError):
    """A function failed, hung or killed its process on some rank; the text holds that rank's
    traceback."""

    def __init__(self, story: str, cause: str = "") -> None:
        super().__init__(story)
        self.cause = cause
        """The error of the first rank that failed, in one line."""


@frozen
class Answer:
    """What one rank sends back."""

    rank: int
    value: Any = None
    problem: str = ""
    cause: str = ""
    """The problem in one line."""
    output: str = field(default="", repr=False)


class Ranks:
    """`world` processes, each one rank of a gloo group. They start with the first `run`."""

    def __init__(self, world: int, *, environment: dict[str, str] | None = None) -> None:
        self.world = world
        self._has_own_environment = bool(environment)
        self.environment = {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"} | (environment or {})
        self._processes: list[Any] = []
        self._pipes: list[connection.Connection] = []
        self._folder: tempfile.TemporaryDirectory[str] | None = None

    def run(
        self, function: Callable[..., Any], *arguments: Any, timeout: float = 300.0
    ) -> list[Any]:
        """Call `function(*arguments)` on every rank at once; return the results in the order of
        ranks.

        The function lives at the top of a module or of a test file; arguments and results are
        pickled. Raises RankFailure, after which the next run starts new processes.
        """
        return self._run(function, arguments, timeout=timeout, fails=False)

    def errors(
        self, function: Callable[..., Any], *arguments: Any, timeout: float = 300.0
    ) -> list[str]:
        """Call a function that raises RLHFError on every rank; return the errors' texts in the
        order of ranks.

        The processes stay, with all that the call has left in them, which after a run on several
        ranks includes its process groups and patches. Raises RankFailure if a rank raises something
        else or nothing.
        """
        return self._run(function, arguments, timeout=timeout, fails=True)

    def _run(
        self, function: Callable[..., Any], arguments: Any, *, timeout: float, fails: bool
    ) -> list[Any]:
        if not self._processes:
            self._start()
        source = sys.modules[function.__module__].__file__
        name = function.__qualname__
        request = (function.__module__, source, name, pickle.dumps(arguments), fails)
        for pipe in self._pipes:
            pipe.send(request)
        answers = self._collect(timeout, doing=name, fails=fails)
        return [answer.value for answer in answers]

    def close(self) -> None:
        """End the processes, as soon as they are idle; only ever those that this pool started."""
        for pipe in self._pipes:
            pipe.close()
        for process in self._processes:
            process.join(GRACE)
        self._kill()

    def _kill(self) -> None:
        atexit.unregister(self.close)
        for process in self._processes:
            process.kill()
            process.join()
        for pipe in self._pipes:
            pipe.close()
        self._processes, self._pipes = [], []
        if self._folder is not None:
            self._folder.cleanup()

    def _start(self) -> None:
        context = self._context()
        self._folder = tempfile.TemporaryDirectory(prefix="rlhf-ranks-")
        store = Path(self._folder.name) / "store"
        for rank in range(self.world):
            ours, theirs = context.Pipe()
            place = {
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "WORLD_SIZE": str(self.world),
                "LOCAL_WORLD_SIZE": str(self.world),
            }
            arguments = (theirs, str(store), self.environment | place)
            # Not daemons, which may have no processes of their own.
            process = context.Process(target=_work, args=arguments)
            with patch.dict(os.environ, self.environment):
                process.start()
            theirs.close()
            self._processes.append(process)
            self._pipes.append(ours)
        atexit.register(self.close)
        self._collect(START, doing="the start")

    def _context(self) -> Any:
        """Return how to start processes: by a fork of one that has imported what all need, unless
        they use a device or variables that libraries read when they are imported."""
        import torch

        if self._has_own_environment or torch.accelerator.is_available():
            return multiprocessing.get_context("spawn")
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["rlhf_devkit.preloaded"])
        return context

    def _collect(self, timeout: float, *, doing: str, fails: bool = False) -> list[Answer]:
        answers: dict[int, Answer] = {}
        deadline = time.monotonic() + timeout
        failed = False
        while len(answers) < self.world:
            waiting = [pipe for rank, pipe in enumerate(self._pipes) if rank not in answers]
            ready = connection.wait(waiting, max(0.0, deadline - time.monotonic()))
            if not ready:
                break
            for pipe in ready:
                rank = self._pipes.index(pipe)  # type: ignore[arg-type]
                answers[rank] = self._receive(rank)
                if answers[rank].problem and not failed:
                    failed = True
                    deadline = min(deadline, time.monotonic() + GRACE)
                if fails:
                    # The others raise too, or wait for this rank.
                    deadline = min(deadline, time.monotonic() + GRACE)
        if failed or len(answers) < self.world:
            self._kill()
            story = _story(answers, world=self.world, doing=doing, timeout=timeout)
            errors = [f"rank {rank} raised: {each.value}" for rank, each in answers.items()]
            causes = [f"rank {each.rank}: {each.cause}" for each in answers.values() if each.cause]
            raise RankFailure("\n".join([story, *(errors if fails else [])]), *causes[:1])
        return [answers[rank] for rank in range(self.world)]

    def _receive(self, rank: int) -> Answer:
        try:
            return self._pipes[rank].recv()
        except EOFError:
            self._processes[rank].join(GRACE)
            code = self._processes[rank].exitcode
            problem = f"the process died with exit code {code}"
            return Answer(rank, problem=problem, cause=problem)


_shared: dict[int, Ranks] = {}


def shared(world: int) -> Ranks:
    """Return the pool of this session with `world` ranks, one for all test files and
    distributions."""
    if world not in _shared:
        _shared[world] = Ranks(world)
    return _shared[world]


def close_shared() -> None:
    """End the processes of all shared pools; a later `run` starts new ones."""
    for ranks in _shared.values():
        ranks.close()


def ranks_fixture(world: int) -> Any:
    """Return a pytest fixture of session scope that gives the shared pool with `world` ranks."""

    @pytest.fixture(scope="session")
    def ranks() -> Ranks:
        return shared(world)

    return ranks


def port_fixture() -> Any:
    """Return a pytest fixture that gives a port for servers that allow reuse."""

    @pytest.fixture
    def port() -> Iterator[int]:
        with hold_port() as held:
            yield held.getsockname()[1]

    return port


def _story(answers: dict[int, Answer], *, world: int, doing: str, timeout: float) -> str:
    parts = []
    for rank, answer in sorted(answers.items()):
        if answer.problem:
            parts.append(
                f"rank {rank} of {world} in {doing}: {answer.problem}\n{answer.output[-2000:]}"
            )
    silent = [str(rank) for rank in range(world) if rank not in answers]
    if silent:
        reason = "after another rank failed" if parts else f"within {timeout:g} s"
        parts.append(f"rank {', '.join(silent)} of {world} in {doing}: no answer {reason}")
    return "\n".join(parts)


def _work(pipe: connection.Connection, store: str, environment: dict[str, str]) -> None:
    """Join the group, then run what comes through the pipe until it closes."""
    try:
        _serve(pipe, store, environment)
    finally:
        atexit._run_exitfuncs()  # A forked process ends without them.


def _serve(pipe: connection.Connection, store: str, environment: dict[str, str]) -> None:
    os.environ.update(environment)
    from torch import distributed

    rank, world = int(environment["RANK"]), int(environment["WORLD_SIZE"])
    distributed.init_process_group(
        "gloo",
        init_method=f"file://{store}",
        rank=rank,
        world_size=world,
        timeout=timedelta(minutes=10),
    )
    pipe.send(Answer(rank))
    imported = 0
    atexit.register(gc.unfreeze)  # Some bindings report what is not collected as leaks.
    while True:
        try:
            request = pipe.recv()
        except EOFError:
            return
        pipe.send(_answer(rank, request))
        if len(sys.modules) > imported:
            # Collections take most of a small run's time unless they skip the libraries.
            imported = len(sys.modules)
            gc.collect()
            gc.freeze()


def _answer(rank: int, request: Sequence[Any]) -> Answer:
    module, source, name, arguments, fails = request
    output = io.StringIO()
    stdout, stderr = sys.stdout, sys.stderr
    sys.stdout = sys.stderr = output
    try:
        function = getattr(_load(module, source), name)
        call = partial(function, *pickle.loads(arguments))
        answer = Answer(rank, value=_error(call) if fails else call())
        pickle.dumps(answer)
    except BaseException as error:
        # Whatever it was, the test has to hear of it and not only this process.
        cause = f"{type(error).__name__}: {first_line(error)}"
        problem, printed = traceback.format_exc(), output.getvalue()
        answer = Answer(rank, problem=problem, cause=cause, output=printed)
    finally:
        sys.stdout, sys.stderr = stdout, stderr
    return answer


def _error(call: Callable[[], Any]) -> str:
    try:
        call()
    except RLHFError as error:
        return str(error)
    raise AssertionError("the function raised no RLHFError")


def _load(name: str, source: str) -> Any:
    """Import a module under the name it has in the test process, so that what is pickled finds its
    classes."""
    if name in sys.modules:
        return sys.modules[name]
    try:
        return importlib.import_module(name)
    except ImportError:
        spec = importlib.util.spec_from_file_location(name, source)
        assert spec is not None, source
        assert spec.loader is not None, source
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        # pytest names a test file by its folders, which are not packages; pickle imports the first.
        for parent in itertools.accumulate(name.split(".")[:-1], "{}.{}".format):
            sys.modules.setdefault(parent, types.ModuleType(parent))
        spec.loader.exec_module(module)
        return module
