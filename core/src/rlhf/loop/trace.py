"""Traces of the device and the host for a viewer such as https://ui.perfetto.dev."""

from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile, schedule

STEPS = 3
"""Steps of one trace; the one before them warms the profiler up."""


class StepTrace:
    """The trace of the `STEPS` steps after step `after`, or no trace if `after` is None. A run
    resumed after that step traces its second step and those that follow.

    Each rank writes `rank-RRRRR.json.gz` into `folder`.
    """

    def __init__(self, after: int | None, folder: Path, rank: int, *, first_step: int) -> None:
        self._first = None if after is None else max(after - 1, first_step)
        self._folder = folder
        self._name = f"rank-{rank:05d}"
        self._profile: profile | None = None

    def before(self, step: int) -> None:
        """Step number `step` (0-based) is about to begin."""
        if self._profile is not None:
            self._profile.step()
        elif step == self._first:
            self._first = None
            kinds = [ProfilerActivity.CPU]
            if torch.cuda.is_available():
                kinds.append(ProfilerActivity.CUDA)
            self._profile = profile(
                activities=kinds,
                schedule=schedule(wait=0, warmup=1, active=STEPS, repeat=1),
                on_trace_ready=self._write,
            )
            self._profile.start()

    def close(self) -> None:
        """Write what the trace has so far."""
        if self._profile is not None:
            self._profile.stop()

    def _write(self, recorded: profile) -> None:
        self._folder.mkdir(exist_ok=True)
        recorded.export_chrome_trace(str(self._folder / f"{self._name}.json.gz"))
