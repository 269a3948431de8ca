"""The thread in which one observer is created and called, so that it cannot hold the run."""

import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from queue import Empty, Queue, SimpleQueue
from typing import Any

import pluggy

from rlhf.errors import first_line
from rlhf.hookspecs import ObserverHooks


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
