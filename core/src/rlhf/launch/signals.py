"""The signals on which a run saves before it ends; a second Ctrl-C ends it at once."""

import ctypes
import os
import signal
import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from types import FrameType

PARENT = "RLHF_PARENT"
"""Variable with the process id of our launcher that started this rank."""
PROBLEMS = "RLHF_PROBLEMS"
"""Variable with the descriptor of the file in which that launcher collects the ranks' errors."""
GATE = "RLHF_GATE"
"""Variable with the descriptor from which a rank reads one byte once that launcher has prepared
the run."""
FOLDER = "RLHF_FOLDER"
"""Variable with the run folder that that launcher has chosen."""
DAY = "RLHF_DAY"
"""Variable with the day of that launcher's run, such as 2026-11-28."""
PR_SET_PDEATHSIG = 1
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
