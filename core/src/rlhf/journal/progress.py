"""A run on the terminal: a progress bar, or a line now and then if the output is not a terminal."""

import time
from collections.abc import Mapping

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as RichProgress

SECONDS_BETWEEN_LINES = 15.0
SHOWN = ("loss", "grad_norm", "learning_rate", "tokens_per_s", "mfu")


class Progress:
    """Steps done and left, the newest metrics, and the time left."""

    def __init__(self, done: int, steps: int) -> None:
        self._steps, self._first = steps, done
        self._start = time.monotonic()
        self._printed: float | None = None
        self._bar = RichProgress(
            TextColumn("step"), MofNCompleteColumn(), BarColumn(bar_width=20),
            TimeRemainingColumn(), TextColumn("{task.fields[metrics]}"),
            disable=not Console().is_terminal,
        )  # fmt: skip
        self._task = self._bar.add_task("train", total=steps, completed=done, metrics="")
        self._bar.start()

    def step(self, step: int) -> None:
        """A step has ended."""
        self._bar.update(self._task, completed=step)

    def logged(self, step: int, metrics: Mapping[str, float]) -> None:
        """The metrics of a logged step are known."""
        if not self._bar.disable:
            speed = f"{_number(metrics['tokens_per_s'])} tokens/s"
            self._bar.update(self._task, metrics=f"loss {_number(metrics['loss'])}  {speed}")
            return
        now = time.monotonic()
        since = SECONDS_BETWEEN_LINES if self._printed is None else now - self._printed
        if step == self._steps or since >= SECONDS_BETWEEN_LINES:
            self._printed = now
            left = (now - self._start) / (step - self._first) * (self._steps - step)
            names = (name for name in SHOWN if name in metrics)
            shown = "  ".join(f"{name} {_number(metrics[name])}" for name in names)
            print(f"step {step}/{self._steps}  {shown}  {_clock(left)} left", flush=True)

    def close(self) -> None:
        """End the bar."""
        self._bar.stop()


def evaluation_line(step: int, metrics: Mapping[str, float]) -> str:
    """Return all metrics of an evaluation in one line."""
    values = "  ".join(f"{name.removeprefix('eval/')} {_number(v)}" for name, v in metrics.items())
    return f"evaluation at step {step}: {values}"


def _number(value: float) -> str:
    if value and abs(value) < 1e-3:
        return f"{value:.2e}"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def _clock(seconds: float) -> str:
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
