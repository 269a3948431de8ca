"""The observers of a run: each has a thread of its own, for which the run waits a limited time."""

from __future__ import annotations

import copy
import functools
import time
from collections.abc import Callable, Mapping
from typing import Any

from rlhf.errors import counted
from rlhf.hookspecs import ObserverHooks, RunRecord
from rlhf.registry.observer_thread import ObserverThread

LIMIT = 5.0
"""Seconds that the run waits for a call."""
BRIEF = 1.0
"""Seconds that it waits after a call of this observer was late, or after a signal."""
LAST, LAST_BRIEF = 30.0, 10.0
"""Seconds that the end of a run may take; after a signal, if the observer has kept up."""
POLL = 0.1
"""Seconds after which a wait looks for a signal."""
MOST_WAITING = 10_000
"""Calls that may wait for an observer: some megabytes."""


class ObserverGateway(ObserverHooks):
    """The observers' hooks with their arguments as keywords; only rank 0 calls them.

    What an observer raises does not end the run: it is reported once, with its traceback in
    `errors/observer-NAME.txt` of the run folder, and this observer is not called again. The run
    waits for a call up to `LIMIT`. Then it continues, and the observer gets the other calls when it
    returns. They hear of the end of a run only if they have heard of its start.
    """

    def __init__(self, observers: Mapping[str, Callable[[], object]]) -> None:
        """`observers` return the objects with the hooks."""
        self._started = self._hurried = False
        self._threads = [ObserverThread(name, make) for name, make in observers.items()]
        for hook in (name for name in vars(ObserverHooks) if not name.startswith("_")):
            setattr(self, hook, functools.partial(self._call, hook))

    def hurry(self) -> None:
        """Wait only briefly from now on, since a signal ends the run. For signal handlers: takes no
        lock."""
        self._hurried = True

    def _call(self, hook: str, *, run: RunRecord, **arguments: Any) -> None:
        self._started |= hook == "on_start"
        if hook == "on_finish" and not self._started:
            return
        self._hurried |= isinstance(arguments.get("error"), KeyboardInterrupt)
        began, deadlines = time.monotonic(), {}
        for thread in [each for each in self._threads if not each.dropped]:
            deadlines[thread] = self._deadline(hook, thread, began)
            # What one observer changes, the run and the others must not see.
            copies = {
                key: copy.deepcopy(value)
                for key, value in arguments.items()
                if isinstance(value, (dict, list))
            }
            thread.post(hook, {"run": run, **arguments, **copies})
            if thread.num_waiting > MOST_WAITING:
                problem = f"is {MOST_WAITING:,} calls behind in {thread.hook}"
                thread.drop(f"{problem} and is not called again", run.folder)
            # The first observer is called first, unless its call takes long.
            self._wait(hook, thread, began, min(deadlines[thread], time.monotonic() + BRIEF))
        for thread, deadline in deadlines.items():
            if deadline > began and not self._wait(hook, thread, began, deadline):
                self._leave(hook, thread, time.monotonic() - began, run)
        if hook == "on_finish":
            for thread in self._threads:
                thread.close()

    def _deadline(self, hook: str, thread: ObserverThread, began: float) -> float:
        """Return until when to wait for a call that begins now."""
        is_busy = not thread.has_returned()
        if hook == "on_finish" and self._hurried:
            return began + (BRIEF if is_busy else LAST_BRIEF)
        if hook == "on_finish":
            return max(began + BRIEF, (thread.since if is_busy else began) + LAST)
        if is_busy:
            return began
        return began + (BRIEF if thread.has_been_late else LIMIT)

    def _wait(self, hook: str, thread: ObserverThread, began: float, deadline: float) -> bool:
        """Return whether all calls return in time. Raises KeyboardInterrupt and SystemExit of the
        observer."""
        while not thread.has_returned(within=min(POLL, max(0.0, deadline - time.monotonic()))):
            is_brief = self._hurried and hook != "on_finish"
            if time.monotonic() >= (min(deadline, began + BRIEF) if is_brief else deadline):
                return False
        return True

    def _leave(self, hook: str, thread: ObserverThread, seconds: float, run: RunRecord) -> None:
        """Say that the run stops waiting for an observer."""
        if hook == "on_finish":
            lost = counted(thread.num_waiting, "call")
            problem = f"has not returned from {thread.hook}; the run ends without it, and {lost}"
            thread.drop(f"{problem} did not get through", run.folder)
        elif not thread.has_been_late:
            thread.has_been_late = True
            if not self._hurried:
                thread.warn(
                    f"has not returned from {thread.hook} for {seconds:.0f} s; the run continues, "
                    "and the observer gets its other calls when it returns"
                )
