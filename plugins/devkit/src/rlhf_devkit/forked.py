"""`python -m rlhf` and scripts in processes of their own that are forks of one with all imports
done: they start in no time, get signals and end as others do. The ranks that they start are forks
too. Tests of what a process imports, and of the real start, use `subprocess`."""

import atexit
import multiprocessing
import os
import runpy
import signal
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from threading import Timer
from types import SimpleNamespace
from typing import Any, Never

import rlhf.__main__ as script
from rlhf.config.sections import STOP_SIGNALS
from rlhf.launch import local
from rlhf.launch.signals import numbers


class Forked:
    """What `subprocess.Popen` is, with the output and the errors as text in pipes, for
    `python WORDS`: `-m rlhf ...` or `FILE ...`. The process leads a session of its own."""

    def __init__(
        self, *words: str, environment: Mapping[str, str], folder: Path | None = None
    ) -> None:
        context: Any = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["rlhf_devkit.preloaded"])
        output, their_output = context.Pipe(duplex=False)
        errors, their_errors = context.Pipe(duplex=False)
        place = str(folder or Path.cwd())
        arguments = (words, dict(environment), place, their_output, their_errors)
        self._process = context.Process(target=_begin, args=arguments)
        self._process.start()
        their_output.close()
        their_errors.close()
        self.args = [*words]
        self.pid: int = self._process.pid
        with suppress(ProcessLookupError):  # It has ended.
            while os.getpgid(self.pid) != self.pid:
                time.sleep(0.001)
        self.stdout, self.stderr = (
            os.fdopen(os.dup(each.fileno()), encoding="utf-8") for each in (output, errors)
        )

    @property
    def returncode(self) -> int | None:
        """The exit code; None while the process runs."""
        code: int | None = self._process.exitcode
        return code

    def poll(self) -> int | None:
        """Return `returncode`."""
        return self.returncode

    def send_signal(self, number: int) -> None:
        """Send a signal to the process, unless it has ended."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        """Send SIGTERM."""
        self.send_signal(signal.SIGTERM)

    def wait(self, timeout: float = 300.0) -> int:
        """Wait for the end; return the exit code."""
        self._process.join(timeout)
        assert self.returncode is not None, f"the process has not ended in {timeout:g} s"
        return self.returncode

    def communicate(self, timeout: float = 300.0) -> tuple[str, str]:
        """Wait for the end; return what is left of the output and of the errors. After `timeout`
        seconds the session is killed."""
        late = Timer(timeout, os.killpg, (self.pid, signal.SIGKILL))
        late.start()
        with ThreadPoolExecutor(2) as pool:
            output, errors = pool.map(lambda stream: stream.read(), (self.stdout, self.stderr))
        self.wait(timeout)
        late.cancel()
        self.stdout.close()
        self.stderr.close()
        return output, errors


def _begin(
    words: Sequence[str],
    environment: Mapping[str, str],
    folder: str,
    output: Connection,
    errors: Connection,
) -> Never:
    os.setsid()
    os.dup2(output.fileno(), 1)
    os.dup2(errors.fileno(), 2)
    output.close()
    errors.close()
    # The streams here may be those of a file, which can seek.
    sys.stdout, sys.stderr = (
        os.fdopen(number, "w", encoding="utf-8", closefd=False) for number in (1, 2)
    )
    os.environ.clear()
    tempfile.tempdir = None
    _set_up(environment)
    os.chdir(folder)
    kept = _descriptors()
    # Not in all of `subprocess`: a run starts other programs too.
    local.subprocess = SimpleNamespace(  # type: ignore[assignment]
        Popen=lambda command, **options: ForkedRank(command, kept, **options)
    )
    _carry_out(words)


class ForkedRank:
    """The process that our launcher starts for a rank."""

    def __init__(
        self,
        command: Sequence[str],
        kept: set[int],
        *,
        env: Mapping[str, str],
        stdout: Any,
        stderr: Any,
        pass_fds: Sequence[int],
    ) -> None:
        self.returncode: int | None = None
        self.pid = os.fork()
        if self.pid == 0:
            for number in (*numbers(STOP_SIGNALS), signal.SIGINT):
                signal.signal(number, signal.SIG_DFL)
            signal.signal(signal.SIGINT, signal.default_int_handler)
            for number, stream in ((1, stdout), (2, stderr)):
                if stream is not None:
                    os.dup2(stream.fileno(), number)
            # As when a program begins: only what it is given stays open.
            for descriptor in _descriptors() - kept - {*pass_fds}:
                with suppress(OSError):  # That of the listing itself.
                    os.close(descriptor)
            _set_up(env)
            _carry_out(command[1:])

    def poll(self) -> int | None:
        """Return the exit code; None while the process runs."""
        return self._wait(os.WNOHANG)

    def wait(self) -> int | None:
        """Wait for the end."""
        return self._wait(0)

    def _wait(self, options: int) -> int | None:
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, options)
            if pid:
                self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode

    def send_signal(self, number: int) -> None:
        """Send a signal to the process."""
        os.kill(self.pid, number)

    def kill(self) -> None:
        """Kill the process."""
        self.send_signal(signal.SIGKILL)


def _descriptors() -> set[int]:
    return {int(path.name) for path in Path("/proc/self/fd").iterdir()}


def _set_up(environment: Mapping[str, str]) -> None:
    os.environ.update(environment)
    for folder in reversed(os.environ.get("PYTHONPATH", "").split(os.pathsep)):
        if folder and folder not in sys.path:
            sys.path.insert(0, folder)


def _carry_out(words: Sequence[str]) -> Never:
    """Do what `python WORDS` does, and end."""
    code = 1
    try:
        if [*words[:2]] == ["-m", "rlhf"]:
            sys.argv = ["rlhf", *words[2:]]
            script.run_process()
        sys.argv = [*words]
        runpy.run_path(words[0], run_name="__main__")
        code = 0
    except SystemExit as exit:
        code = exit.code if isinstance(exit.code, int) else int(exit.code is not None)
    except BaseException:
        sys.excepthook(*sys.exc_info())  # torch's names the rank.
    finally:
        atexit._run_exitfuncs()  # The last one of `rlhf` ends the process.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
