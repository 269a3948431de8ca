"""The signals that stop a run. In its steps it saves before it ends, and a second Ctrl-C ends it at
once; before and after them it ends at once, from the first moment of its processes on."""

import ctypes
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from types import FrameType

from rlhf.config.sections import STOP_SIGNALS

STOPPED, INTERRUPTED = 143, 130
"""Exit codes of a run that a signal has stopped, and after Ctrl-C outside of its steps."""
PARENT = "RLHF_PARENT"
"""Variable with the process id of our launcher that started this rank."""
PROBLEMS = "RLHF_PROBLEMS"
"""Variable with the descriptor of the file in which that launcher collects the ranks' errors."""
REQUEST = "RLHF_REQUEST"
"""File descriptor from which a rank of our launcher reads what it has to do."""
GATE = "RLHF_GATE"
"""Variable with the descriptor from which a rank reads one byte once that launcher has prepared
the run."""
FOLDER = "RLHF_FOLDER"
"""Variable with the run folder that that launcher has chosen."""
DAY = "RLHF_DAY"
"""Variable with the day of that launcher's run, such as 2026-11-28."""
PR_SET_PDEATHSIG = 1
PATIENCE = 5.0
"""Seconds after which a signal ends a process in which no handler runs."""
BEFORE_STEPS = (
    "stopped before the first step: nothing was trained; continue with --resume, or start again if "
    "there is no run folder"
)
OUTSIDE_OF_STEPS = (
    "stopped before or after training steps; continue with --resume, or start again if there is no "
    "run folder"
)
"""As the launcher sees it."""
AFTER_STEPS = "stopped after the last step; --resume writes what is missing"
STOPPING = (
    b"\nstopping: the current step is finished and saved; press Ctrl-C again to quit immediately\n"
)


def die_with(parent: int) -> None:
    """Have the kernel kill this process when `parent`, the process that started it, dies. Only
    Linux can."""
    if sys.platform.startswith("linux"):
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # It died before the call above.
            os.kill(os.getpid(), signal.SIGKILL)


def numbers(names: Sequence[str]) -> list[int]:
    """Return the numbers of signals: TERM is 15."""
    return [signal.Signals[f"SIG{name}"] for name in names]


def catch(
    handler: Callable[[int, FrameType | None], None], names: Sequence[str] = ("TERM",)
) -> ExitStack:
    """Install `handler` for the named signals and Ctrl-C. The previous handlers return when the
    stack is closed. Does nothing outside of the main thread, where Python allows no handlers."""
    caught = ExitStack()
    if threading.current_thread() is threading.main_thread():
        for number in (*numbers(names), signal.SIGINT):
            caught.callback(signal.signal, number, signal.signal(number, handler))
    return caught


def quit_on_next_ctrl_c(*, announce: bool) -> None:
    """Let the next Ctrl-C end the process at once; with `announce`, print that it does."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if announce:
        # Not `print`: the signal may have interrupted one.
        os.write(2, STOPPING)


class Stopped(SystemExit):
    """A signal has stopped the run outside of its steps, where there is nothing to save."""


class _Ending:
    """A handler that prints a message on rank 0 and raises Stopped, or KeyboardInterrupt on
    Ctrl-C."""

    message = BEFORE_STEPS

    def __call__(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGINT:
            raise KeyboardInterrupt
        # Sent twice, it would interrupt the end.
        signal.signal(number, signal.SIG_IGN)
        self.announce()
        raise Stopped(STOPPED)

    def announce(self) -> None:
        """Print the message. Not with `print`, which the signal may have interrupted."""
        if os.environ.get("RANK", "0") == "0":
            os.write(1, f"{self.message}\n".encode())


@contextmanager
def ending_at_once(names: Sequence[str]) -> Iterator[None]:
    """Raise Stopped on the named signals in this block, also on one that was held back, after rank
    0 has printed a line; raise KeyboardInterrupt on Ctrl-C."""
    with catch(_Ending(), names):
        before = signal.pthread_sigmask(signal.SIG_BLOCK, ())
        try:
            release()
            yield
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)


def steps_are_over() -> None:
    """Let the line that `ending_at_once` prints say that the steps are over."""
    for number in numbers(STOP_SIGNALS):
        if isinstance(handler := signal.getsignal(number), _Ending):
            handler.message = AFTER_STEPS


def hold_back() -> None:
    """Hold back the signals that may stop a run, until `ending_at_once` knows which of them do. For
    the start of a process."""
    signal.pthread_sigmask(signal.SIG_BLOCK, numbers(STOP_SIGNALS))


def release() -> None:
    """Let the signals come that were held back, and those that are sent from now on."""
    signal.pthread_sigmask(signal.SIG_UNBLOCK, numbers(STOP_SIGNALS))


def end_late() -> None:
    """Have a signal that `ending_at_once` handles end this process even if it waits in a library,
    where Python runs no handler: ranks that meet wait for minutes. For the start of a process."""
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    os.register_at_fork(after_in_child=_forget)
    threading.Thread(target=_watch, args=[reader], daemon=True).start()


def _forget() -> None:
    """Let a process that was forked from a rank, such as one that tokenises, end as others do."""
    signal.set_wakeup_fd(-1)
    for number in (*numbers(STOP_SIGNALS), signal.SIGINT):
        if isinstance(signal.getsignal(number), _Ending):
            default = signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL
            signal.signal(number, default)


def _watch(reader: int) -> None:
    """End the process if an `_Ending` has not done so: no handler ran, or a library caught what it
    raised. Runs in a thread; the signal itself writes its number into the pipe."""
    while True:
        (number,) = os.read(reader, 1)
        handler = signal.getsignal(number)
        if isinstance(handler, _Ending) or handler is signal.SIG_IGN:
            time.sleep(PATIENCE)
            late = signal.getsignal(number)
            if isinstance(late, _Ending) and number != signal.SIGINT:
                late.announce()
            os._exit(INTERRUPTED if number == signal.SIGINT else STOPPED)
