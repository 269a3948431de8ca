"""The files of a checkpoint, written by a background thread or at once."""

import threading
from collections.abc import Callable
from concurrent.futures import Future


class Writing:
    """This rank's part of a checkpoint while it is being written."""

    def __init__(
        self, write: Callable[[], None], *, step: int, best: int | None, background: bool
    ) -> None:
        self.step = step
        self.best = best
        """The step of the best evaluation when the checkpoint was taken."""
        self._end: Future[None] = Future()
        if background:
            # Not a thread of a pool: Python would wait for it when a second Ctrl-C ends the run.
            threading.Thread(target=self._run, args=(write,), daemon=True).start()
        else:
            self._run(write)

    @property
    def is_done(self) -> bool:
        """Whether the files are on disk or an error has ended the writing."""
        return self._end.done()

    def wait(self) -> None:
        """Wait for the end. Raises the error that ended the writing."""
        self._end.result()

    def _run(self, write: Callable[[], None]) -> None:
        try:
            write()
        except BaseException as error:
            self._end.set_exception(error)
        else:
            self._end.set_result(None)
