"""A run on the terminal: a progress bar, or a line now and then if the output is not a terminal."""

import time
from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as RichProgress

SECONDS_BETWEEN_LINES = 15.0
PROMPT, ANSWER = 30, 50
"""Characters that are shown of the texts of a sample."""
SHOWN = ("loss", "reward", "grad_norm", "learning_rate", "tokens_per_s", "mfu")


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
        """Advance the bar to a finished step."""
        self._bar.update(self._task, completed=step)

    def logged(self, step: int, metrics: Mapping[str, float]) -> None:
        """Show the metrics of a logged step."""
        if not self._bar.disable:
            speed = f"{_number(metrics['tokens_per_s'])} tokens/s"
            # The loss says little where the answers change from step to step.
            name = "reward" if "reward" in metrics else "loss"
            self._bar.update(self._task, metrics=f"{name} {_number(metrics[name])}  {speed}")
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


def sample_line(sample: Mapping[str, Any]) -> str:
    """Return a sample in one line: the end of its prompt, without its images, and the beginning of
    each answer, with its score if it has one (the last of several)."""
    answers = [_short(text, ANSWER) for text in sample["answers"]]
    if "scores" in sample:
        lasts = (score[-1:] if isinstance(score, list) else [score] for score in sample["scores"])
        answers = [
            f"{''.join(map(_number, last)) or '-'}: {text}"
            for last, text in zip(lasts, answers, strict=True)
        ]
    prompt = sample["prompt"].split("\n", len(sample.get("images", ())))[-1]
    return f"sample     {_short(prompt, PROMPT, end=True)} -> {' | '.join(answers)}"


def _short(text: str, size: int, *, end: bool = False) -> str:
    text = " ".join(text.split())
    if len(text) <= size:
        return text
    if not end:
        return f"{text[:size]}..."
    return f"...{text[-1 - size :].partition(' ')[2] or text[-size:]}"


def _number(value: float) -> str:
    if value and abs(value) < 1e-3:
        return f"{value:.2e}"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def _clock(seconds: float) -> str:
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
