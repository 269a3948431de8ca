"""When a run ends before its schedule: a signal, the wall clock or `train.stop_at`, agreed by all
ranks."""

import os
import signal
import time
from types import FrameType

from rlhf.config.sections import TrainConfig
from rlhf.engine import Deferred, Mesh, on_device
from rlhf.launch.signals import PARENT, catch, quit_on_next_ctrl_c, restore


class StopWatch:
    """Asks after every step whether to go on. A rank's wish reaches all ranks with the next step's
    answer, so nobody waits for it and all of them stop after the same step."""

    def __init__(self, train: TrainConfig, mesh: Mesh) -> None:
        self._mesh = mesh
        self._stop_at = train.stop_at
        self._until = time.monotonic() + train.hours * 3600 if train.hours else None
        # Nothing with a lock: a second signal may come while the first is being handled.
        self._signalled = False
        self._asked: Deferred | None = None
        self._previous = catch(self._on_signal)

    def reason(self, steps_done: int) -> str | None:
        """Why to stop now: "signal", "hours" or "stop_at"; None to go on. The same on every rank.
        Collective."""
        if self._stop_at is not None and steps_done >= self._stop_at:
            return "stop_at"
        late = self._until is not None and time.monotonic() > self._until
        if self._mesh.world == 1:
            return _said(self._signalled, late)
        wishes = on_device([float(self._signalled), float(late)], self._mesh.device)
        asked, self._asked = self._asked, Deferred(self._mesh.sum(wishes))
        return None if asked is None else _said(*asked.read())

    def close(self) -> None:
        """Give the signals back to whom they belonged."""
        restore(self._previous)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGINT:
            quit_on_next_ctrl_c(announce=self._mesh.rank == 0 and PARENT not in os.environ)
        self._signalled = True


def _said(signals: float, clocks: float) -> str | None:
    return "signal" if signals else "hours" if clocks else None
