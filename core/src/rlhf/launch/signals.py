"""The signals on which a run saves before it ends; a second Ctrl-C ends it at once."""

import os
import signal
import threading
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any

PARENT = "RLHF_PARENT"
"""Variable with the process id of the launcher of ours that started this rank."""
STOPPING = (
    b"\nstopping: the current step is finished and saved; press Ctrl-C again to quit immediately\n"
)
Handlers = dict[int, Any]


def numbers(names: Sequence[str]) -> list[int]:
    """Return the numbers of signals: TERM is 15."""
    return [signal.Signals[f"SIG{name}"] for name in names]


def catch(
    handler: Callable[[int, FrameType | None], None], names: Sequence[str] = ("TERM",)
) -> Handlers:
    """Install `handler` for the named signals and Ctrl-C and return the previous handlers.

    Does nothing outside of the main thread, where Python allows no handlers.
    """
    if threading.current_thread() is not threading.main_thread():
        return {}
    return {number: signal.signal(number, handler) for number in (*numbers(names), signal.SIGINT)}


def restore(handlers: Handlers) -> None:
    """Install the handlers that `catch` returned."""
    for number, handler in handlers.items():
        signal.signal(number, handler)


def quit_on_next_ctrl_c(*, announce: bool) -> None:
    """Let the next Ctrl-C end the process at once; with `announce`, print that it does."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if announce:
        # Not `print`: the signal may have interrupted one.
        os.write(2, STOPPING)
