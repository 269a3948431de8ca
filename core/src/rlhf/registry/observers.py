"""The observers of a run: each has a thread of its own, for which the run waits a limited time."""

from __future__ import annotations

import copy
import functools
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from queue import Empty, Queue, SimpleQueue
from typing import Any

import pluggy

from rlhf.errors import counted, first_line
from rlhf.hookspecs import ObserverHooks, RunRecord

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


class ObserverThread(threading.Thread):
    """Creates an observer at the first call and calls its hooks, one after the other.

    An observer that raises is reported once and not called again. KeyboardInterrupt and SystemExit
    are raised by `has_returned`, in the thread of the run.
    """

    def __init__(self, name: str, make: Callable[[], object]) -> None:
        """`make` returns the object with the hooks."""
        # A daemon: Python does not wait for it at the end of the process.
        super().__init__(name=f"observer {name}", daemon=True)
        self.hook, self.since = "__init__", 0.0
        """What was called last, and when."""
        self.num_waiting = 0
        """Calls that have not returned."""
        self.has_been_late = False
        """Whether the run has stopped waiting for a call."""
        self.dropped = False
        """Whether the observer is not called any more."""
        self._observer, self._make = name, make
        self._made: object = None
        self._hooks: Any = None
        self._calls: SimpleQueue[tuple[str, Mapping[str, Any]] | None] = SimpleQueue()
        # SimpleQueue.get waits forever if its time ends while a signal is handled.
        self._ends: Queue[BaseException | None] = Queue()

    def post(self, hook: str, arguments: Mapping[str, Any]) -> None:
        """Have a hook called after all calls before it."""
        self.num_waiting += 1
        self._calls.put((hook, arguments))
        if self.ident is None:
            self.start()

    def has_returned(self, *, within: float = 0.0) -> bool:
        """Return whether all calls return within so many seconds."""
        deadline = time.monotonic() + within
        while self.num_waiting and not self.dropped:
            try:
                error = self._ends.get(timeout=max(0.0, deadline - time.monotonic()))
            except Empty:
                return False
            self.num_waiting -= 1
            if error is not None:
                raise error
        return True

    def drop(self, problem: str, folder: Path, text: str | None = None) -> None:
        """Call the observer no more, and say why. `errors/` of the run folder gets `text`, by
        default where the thread is."""
        if text is None:
            frame = sys._current_frames().get(self.ident or 0)
            text = "".join(traceback.format_stack(frame))
        file = folder / "errors" / f"observer-{self._observer}.txt"
        try:
            file.parent.mkdir(exist_ok=True)
            file.write_text(_printable(text), encoding="utf-8")
            self.warn(problem, f"; see {file}")
        except OSError:
            self.warn(problem, f"; its traceback:\n{text}")
        # Last, since the run does not wait for an observer that is dropped.
        self.dropped = True

    def warn(self, problem: str, more: str = "") -> None:
        """Print what is wrong, and the remedy that the observer names, if any."""
        remedy = getattr(self._made, "remedy", "")
        line = f"warning: observer {self._observer!r} {problem}{remedy and f'; {remedy}'}{more}"
        print(_printable(line), file=sys.stderr, flush=True)

    def close(self) -> None:
        """End the thread after the calls that wait."""
        self._calls.put(None)

    def run(self) -> None:
        # For the threads that the observer starts, which inherit it: Python waits for these.
        self._daemonic = False
        while (call := self._calls.get()) is not None:
            ended: BaseException | None = None
            try:
                if not self.dropped:
                    self._call(*call)
            except Exception as error:  # An observer's own code may raise anything.
                self._report(error, call[1]["run"].folder)
            except BaseException as error:
                ended = error
            self._ends.put(ended)

    def _call(self, hook: str, arguments: Mapping[str, Any]) -> None:
        self.since = time.monotonic()
        if self._hooks is None:
            self._made = self._make()
            self._hooks = hooks_of(self._made)
        self.hook, self.since = hook, time.monotonic()
        getattr(self._hooks, hook)(**arguments)

    def _report(self, error: Exception, folder: Path) -> None:
        if not self.dropped:
            said = f"{type(error).__name__}: {first_line(error)}"
            text = "".join(traceback.format_exception(error))
            self.drop(f"failed in {self.hook} and is not called again: {said}", folder, text)


def hooks_of(observer: object) -> Any:
    """Return the hooks of one observer, which take their arguments as keywords."""
    manager = pluggy.PluginManager("rlhf")
    manager.add_hookspecs(ObserverHooks)
    manager.register(observer)
    manager.check_pending()
    return manager.hook


def _printable(text: str) -> str:
    """Return the text with halves of surrogate pairs escaped, which no file can hold."""
    return text.encode(errors="backslashreplace").decode()
