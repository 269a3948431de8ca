"""What a run reports: metrics.jsonl, the observers and the terminal. Each number is written one
step late, so that the host does not wait for the device."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from attrs import define, field, frozen
from torch import Tensor

from rlhf.contract.sums import Derive, ReducedSums
from rlhf.data.batch import PackedBatch
from rlhf.data.order import StepPlan
from rlhf.engine import GIB, Engine, LaterOutcome, StepOutcome
from rlhf.folder.run_folder import METRICS, SAMPLES, RunFolder
from rlhf.hookspecs import RunRecord
from rlhf.registry.observers import ObserverGateway
from rlhf.train.progress import Progress, evaluation_line, sample_line
from rlhf.train.speed import Speed


@frozen(kw_only=True)
class StepResult:
    """One optimizer step, as the loop reports it."""

    plan: StepPlan
    batches: Sequence[PackedBatch]
    """What this rank's loader packed for it."""
    losses: Sequence[Tensor]
    """The weighted loss of each of this rank's micro-batches."""
    outcomes: Mapping[str, StepOutcome | LaterOutcome]
    """By role of the trained models."""
    learning_rates: Mapping[str, float]
    report: ReducedSums | None
    """Its metrics, or None if it is not logged."""

    @property
    def step(self) -> int:
        """Optimizer steps of the run so far."""
        return self.plan.step + 1


@define(kw_only=True)
class Journal:
    """The run's reports. Every rank has one; only rank 0's writes, prints and calls observers."""

    folder: RunFolder | None
    """The run folder on rank 0, None on the other ranks."""
    observers: ObserverGateway
    record: RunRecord
    engine: Engine
    """The policy's."""
    speed: Speed
    derive: Derive
    notes: Sequence[str] = ()
    """Lines of the run; those that are added while it takes steps are printed after the step."""
    tokens_seen: int = 0
    """Tokens of all steps so far, over all ranks (`num_tokens`)."""
    skipped: int = 0
    """Steps that fp16's loss scaler skipped."""
    last: dict[str, float] = field(factory=dict)
    """The newest value of every metric, of evaluations too."""
    _pending: tuple[StepResult, dict[str, Any]] | None = field(default=None, init=False)
    """A logged step whose sums are still being copied, and its numbers from the host."""
    _progress: Progress | None = field(default=None, init=False)
    _noted: int = field(default=0, init=False)
    """How many of the notes have been printed."""
    _not_finite: set[str] = field(factory=set, init=False)
    """Metrics of which a warning was printed."""

    def state(self) -> dict[str, int]:
        """Return what a checkpoint must hold (plain data)."""
        return {"tokens_seen": self.tokens_seen, "skipped": self.skipped}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Restore what `state` returned."""
        self.tokens_seen, self.skipped = state["tokens_seen"], state["skipped"]

    def start(self) -> None:
        """Report the start of the run, once the models are ready and the notes so far printed."""
        self._noted = len(self.notes)
        if self.folder is not None:
            self.observers.on_start(run=self.record)

    def start_steps(self, first_step: int) -> None:
        """Start the progress bar and the clock right before the first step."""
        if self.folder is not None:
            self._progress = Progress(first_step, self.record.steps)
        self._show_notes()
        self.speed = self.speed.restarted()

    def step(self, result: StepResult) -> None:
        """Count a finished step; its metrics are written when the next one ends."""
        self.speed.add(result.plan, result.batches)
        self.tokens_seen += int(result.plan.lengths.sum())
        self.skipped += any(item.skipped_by_scaler for item in result.outcomes.values())
        self.flush()
        self._show_notes()
        if result.report is not None:
            self._pending = (result, self._host_metrics(result))
        if self._progress is not None:
            self._progress.step(result.step)

    def _show_notes(self) -> None:
        """Print the notes that are new."""
        new, self._noted = self.notes[self._noted :], len(self.notes)
        if new and self.folder is not None:
            print("\n".join(new), flush=True)

    def start_evaluation(self) -> None:
        """Note that an evaluation begins; its time does not count as that of steps."""
        self.flush()
        self.speed.clock.enter("evaluation")

    def evaluation(
        self, step: int, report: ReducedSums, samples: Sequence[Mapping[str, Any]] = ()
    ) -> None:
        """Report an evaluation that has ended."""
        metrics = {f"eval/{name}": value for name, value in report.read(self.derive).items()}
        self.last |= metrics
        if self.folder is not None:
            self.folder.append(METRICS, {"step": step, **metrics})
            self.observers.on_eval(run=self.record, step=step, metrics=metrics)
            if samples:
                self.folder.append(SAMPLES, *({"step": step, **sample} for sample in samples))
                self.observers.on_samples(run=self.record, step=step, samples=samples)
            # Above the progress bar, if there is one: rich prints around it.
            lines = [evaluation_line(step, metrics), *map(sample_line, samples)]
            print("\n".join(lines), flush=True)
            self._warn(step, metrics)
        self.speed.clock.enter("steps")

    def flush(self) -> None:
        """Write the last logged step; waits for the copy of its sums."""
        pending, self._pending = self._pending, None
        if pending is None or self.folder is None:
            return
        result, host = pending
        assert result.report is not None, "only a logged step is kept"
        norms = {role: outcome.read().grad_norm for role, outcome in result.outcomes.items()}
        read = result.report.read(self.derive)
        self._warn(result.step, read)
        metrics = read | per_role("grad_norm", norms) | host
        self.last |= metrics
        self.folder.append(METRICS, {"step": result.step, **metrics})
        self.observers.on_step(run=self.record, step=result.step, metrics=metrics)
        if self._progress is not None:
            self._progress.logged(result.step, metrics)

    def close(self) -> None:
        """End the progress bar."""
        if self._progress is not None:
            self._progress.close()

    def _warn(self, step: int, metrics: Mapping[str, float]) -> None:
        """Print a warning for each metric that is not finite for the first time."""
        names = {
            name
            for name, value in metrics.items()
            if isinstance(value, float) and not math.isfinite(value)
        }
        for name in sorted(names - self._not_finite):
            print(f"warning: step {step}: the metric {name!r} is {metrics[name]}", flush=True)
        self._not_finite |= names

    def _host_metrics(self, result: StepResult) -> dict[str, Any]:
        """Return what is known without the device's sums, and start to measure the speed again."""
        speed, self.speed = self.speed, self.speed.restarted()
        host: dict[str, Any] = {
            **per_role("learning_rate", result.learning_rates),
            "epoch": result.plan.epoch_done,
            "num_tokens": self.tokens_seen,
            **speed.metrics(),
        }
        device = self.engine.device
        if device.type != "cpu":
            host["peak_memory_gib"] = torch.accelerator.max_memory_allocated(device) / GIB
        if getattr(self.engine.module, "path", None) == "tree":
            host["padding"] = speed.padding
        if self.engine.precision == "fp16":
            host["skipped_steps"] = self.skipped
        return host


def per_role(name: str, values: Mapping[str, float]) -> dict[str, float]:
    """Return a metric of every trained model: the policy's has the name itself, the others' names
    begin with their role."""
    return {name if role == "policy" else f"{role}/{name}": value for role, value in values.items()}
