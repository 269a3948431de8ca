"""SIGTERM and Ctrl-C: a run saves before it ends, and a second Ctrl-C ends it at once."""

import os
import signal
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any

PARENT = "RLHF_PARENT"
"""The launcher of ours that started this rank, which tells for all of them."""
Handlers = dict[int, Any]


def catch(handler: Callable[[int, FrameType | None], None]) -> Handlers:
    """Have SIGTERM and Ctrl-C call `handler`, in the main thread alone; the handlers before it."""
    if threading.current_thread() is not threading.main_thread():
        return {}
    return {number: signal.signal(number, handler) for number in (signal.SIGTERM, signal.SIGINT)}


def give_back(handlers: Handlers) -> None:
    """Install what `catch` gave."""
    for number, handler in handlers.items():
        signal.signal(number, handler)


def end_at_the_next(*, told: bool) -> None:
    """Have another Ctrl-C end the process at once, and say so if this is where it is `told`."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if told:
        # A handler may have interrupted somebody who writes.
        os.write(
            2, b"\nstopping; a step under way is finished and saved. Ctrl-C again ends at once\n"
        )
