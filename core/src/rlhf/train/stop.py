"""When a run ends early: on a signal, after `train.hours` or at `train.stop_at`; ranks agree."""

import math
import os
import signal
import sys
import time
from collections.abc import Callable
from types import FrameType

from rlhf.config.sections import Config
from rlhf.devices import Deferred, on_device
from rlhf.engine import Mesh
from rlhf.launch.signals import PARENT, catch, quit_on_next_ctrl_c


class StopWatch:
    """Decides after every step whether to stop. A signal on one rank reaches all ranks with the
    next step, so no rank waits for it and all of them stop after the same step."""

    def __init__(self, config: Config, mesh: Mesh, *, on_signal: Callable[[], None]) -> None:
        """`on_signal` is called in the signal handler."""
        self._mesh, self._on_stop = mesh, on_signal
        train = config.train
        self._stop_at = train.stop_at or math.inf
        self._timeout = config.checkpoint.stop_timeout
        self._warned = False
        self._until = time.monotonic() + train.hours * 3600 if train.hours else None
        # A plain bool: a lock would deadlock when a second signal interrupts the handler.
        self._signalled = False
        self._votes: Deferred | None = None
        """Whether a rank wants to stop after the previous step, by reason."""
        self.caught = catch(self._on_signal, config.checkpoint.stop_signals)
        """Brings the signal handlers from before back when it is closed."""

    def stop_at(self, steps_done: int) -> str | None:
        """Return "stop_at" if the run should end here at the latest, or None."""
        return "stop_at" if steps_done >= self._stop_at else None

    def reason(self, steps_done: int) -> str | None:
        """Return why to stop now, "signal", "hours" or "stop_at", or None to continue; the same on
        every rank. Collective."""
        if stop_at := self.stop_at(steps_done):
            return stop_at
        late = self._until is not None and time.monotonic() > self._until
        if self._mesh.world == 1:
            return _reason(self._signalled, late)
        own = on_device([float(self._signalled), float(late)], self._mesh.device)
        votes, self._votes = self._votes, Deferred(self._mesh.max(own))
        return None if votes is None else _reason(*votes.read())

    def check_timeout(self, step: float, save: float) -> None:
        """Warn once if a step and a save, of these seconds, may take longer than a stopped run has:
        the ranks agree on a signal one step after it."""
        steps = 1 if self._mesh.world == 1 else 2
        if self._mesh.rank == 0 and not self._warned and steps * step + save > self._timeout:
            self._warned = True
            print(
                f"warning: a stopped run needs about {steps * step + save:,.1f} s to save (a step "
                f"takes {step:,.1f} s and a checkpoint {save:,.1f} s), but "
                f"checkpoint.stop_timeout is {self._timeout:g} s; raise it",
                file=sys.stderr,
                flush=True,
            )

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGINT:
            quit_on_next_ctrl_c(announce=self._mesh.rank == 0 and PARENT not in os.environ)
        self._signalled = True
        self._on_stop()


def _reason(signals: float, clocks: float) -> str | None:
    return "signal" if signals else "hours" if clocks else None
