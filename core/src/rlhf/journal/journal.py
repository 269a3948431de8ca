"""What a run tells: metrics.jsonl, the observers and the terminal; each number once, a step late,
without waiting."""

import time
from collections.abc import Mapping, Sequence
from typing import Any

from attrs import define, field

from rlhf.data.batch import PackedBatch
from rlhf.data.order import StepPlan
from rlhf.engine import LaterOutcome, StepOutcome
from rlhf.journal.progress import Progress, evaluation_line
from rlhf.journal.speed import peak_memory_gib
from rlhf.journal.sums import Report
from rlhf.loop.session import Session


@define
class Pending:
    """A logged step whose sums are still on their way to the host."""

    step: int
    report: Report
    outcome: StepOutcome | LaterOutcome
    host: dict[str, Any]


@define
class Journal:
    """Kept on every rank; only rank 0's writes, shows and calls observers."""

    session: Session
    tokens_seen: int = 0
    """Tokens of all steps so far, over all ranks (`num_tokens`)."""
    skipped: int = 0
    """Steps that fp16's loss scaler skipped."""
    last: dict[str, float] = field(factory=dict)
    """The newest metrics, evaluations too."""
    _pending: Pending | None = None
    _progress: Progress | None = None
    _outcome: StepOutcome | LaterOutcome | None = None
    _rate: float = 0.0
    _since: float = field(factory=time.perf_counter)
    _paused: float = 0.0
    _plans: list[StepPlan] = field(factory=list)
    _in_one_row: bool = False
    _useful: int = 0
    _computed: int = 0
    """Tokens of this rank's rows since the last logged step, without and with padding."""

    def start(self, first_step: int) -> None:
        """The first step is next."""
        # Other paths lay the tokens out in rows of their own.
        self._in_one_row = self.session.engine.module.path == "tree"
        if self._leads:
            self._progress = Progress(first_step, self.session.num_steps)
            self.session.observers.on_start(run=self.session.record)
        self._since = time.perf_counter()

    def outcome(self, outcome: StepOutcome | LaterOutcome, rate: float) -> None:
        """What the optimizer did in this step, and at which learning rate."""
        self._outcome, self._rate = outcome, rate
        self.skipped += outcome.skipped_by_scaler

    def step(
        self, step: int, plan: StepPlan, batches: Sequence[PackedBatch], report: Report | None
    ) -> None:
        """A step on `batches` has ended; `report` is None where it is not logged."""
        self._plans.append(plan)
        self._useful += sum(batch.num_tokens for batch in batches)
        self._computed += sum(len(batch.tokens) for batch in batches)
        self.tokens_seen += int(plan.lengths.sum())
        self._write_pending()
        if report is not None:
            assert self._outcome is not None
            self._pending = Pending(step, report, self._outcome, self._host_metrics(plan))
            self._plans.clear()
        if self._progress is not None:
            self._progress.step(step)

    def evaluating(self) -> None:
        """An evaluation begins, whose time is not that of steps."""
        self.flush()
        self._paused = time.perf_counter()

    def evaluated(self, step: int, report: Report) -> None:
        """An evaluation has ended."""
        metrics = {f"eval/{name}": value for name, value in report.read(self._derive).items()}
        self.last |= metrics
        if self._leads:
            self._write(step, metrics)
            self.session.observers.on_eval(run=self.session.record, step=step, metrics=metrics)
            if self._progress is not None:
                self._progress.evaluated(step, metrics)
            else:
                print(evaluation_line(step, metrics), flush=True)
        self._since += time.perf_counter() - self._paused

    def flush(self) -> None:
        """Write what is still on its way."""
        self._write_pending()

    def close(self) -> None:
        """End the progress bar."""
        if self._progress is not None:
            self._progress.close()

    @property
    def _leads(self) -> bool:
        return self.session.folder is not None

    def _derive(self, sums: Mapping[str, float]) -> Mapping[str, float]:
        return self.session.trainer.derive(sums)

    def _host_metrics(self, plan: StepPlan) -> dict[str, Any]:
        """What is known without the device's sums."""
        now = time.perf_counter()
        seconds, self._since = now - self._since, now
        tokens = sum(float(done.lengths.sum()) for done in self._plans)
        speed = {"tokens_per_s": tokens / seconds}
        if self.session.speed.peak is not None:
            flops = sum(self.session.speed.flops(done) for done in self._plans)
            speed["mfu"] = flops / seconds / self.session.speed.peak
        memory = peak_memory_gib(self.session.mesh.device)
        host: dict[str, Any] = {
            "learning_rate": self._rate,
            "epoch": plan.epoch_done,
            "num_tokens": self.tokens_seen,
            **speed,
        }
        if memory is not None:
            host["peak_memory_gib"] = memory
        if self._in_one_row:
            host["padding"] = 1 - self._useful / self._computed
        self._useful = self._computed = 0
        if self.session.engine.precision == "fp16":
            host["skipped_steps"] = self.skipped
        return host

    def _write_pending(self) -> None:
        pending, self._pending = self._pending, None
        if pending is None or not self._leads:
            return
        norm = {"grad_norm": pending.outcome.read().grad_norm}
        metrics = pending.report.read(self._derive) | norm | pending.host
        self.last |= metrics
        self._write(pending.step, metrics)
        self.session.observers.on_step(run=self.session.record, step=pending.step, metrics=metrics)
        if self._progress is not None:
            self._progress.logged(pending.step, metrics)

    def _write(self, step: int, metrics: Mapping[str, Any]) -> None:
        assert self.session.folder is not None
        self.session.folder.append_metrics({"step": step, **metrics})
