"""What a run reports of its steps: how fast they were, and how many the loss scaler skipped."""

import time
from pathlib import Path

import pytest
import torch

from rlhf.contract.sums import ReducedSums, Sums
from rlhf.data.order import RunOrder
from rlhf.engine import LaterOutcome, Mesh, StepOutcome
from rlhf.folder.run_folder import RunFolder
from rlhf.hookspecs import CORE_METRICS
from rlhf.train.journal import StepResult
from rlhf.train.session import Session
from rlhf.trainer import Loss
from rlhf_devkit import tiny

MOVED = StepOutcome(moved=True, grad_norm=1.0)


@pytest.fixture
def session(tmp_path: Path) -> Session:
    words = [*tiny.short_run(tmp_path, "demonstration"), "--output", str(tmp_path / "run")]
    return tiny.in_plain_torch("sft", words, str(tmp_path / "cache"))[1]


def result(
    order: RunOrder,
    number: int,
    outcome: StepOutcome | LaterOutcome,
    report: ReducedSums | None = None,
) -> StepResult:
    plan = order.step(number)
    return StepResult(
        plan=plan, batches=[order[plan.micro[0]]], losses=[], outcomes={"policy": outcome},
        learning_rates={"policy": 0.1}, report=report,
    )  # fmt: skip


def report(**metrics: float) -> ReducedSums:
    sums = Sums(Mesh())
    named = {name: (torch.tensor(value), "rows") for name, value in metrics.items()}
    sums.add(Loss((), named), torch.tensor(1.0))
    return sums.reduce({"rows": 1.0})


def test_the_time_of_an_evaluation_is_not_that_of_steps(
    session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 100.0
    monkeypatch.setattr(time, "perf_counter", lambda: now)
    diary, order = session.journal, session.train_order
    diary.start_steps(0)
    now += 2
    diary.step(result(order, 0, MOVED))
    diary.start_evaluation()
    now += 1000
    diary.evaluation(1, report())
    now += 3
    diary.step(result(order, 1, MOVED, report()))
    tokens = sum(int(order.step(number).lengths.sum()) for number in range(2))
    assert diary._pending is not None
    assert diary._pending[1]["tokens_per_s"] == pytest.approx(tokens / 5)
    assert diary._pending[1].keys() <= CORE_METRICS


def test_notes_of_the_evaluation_at_the_start_are_printed(
    session: Session, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    diary = session.journal
    diary.folder = RunFolder(tmp_path / "shown", fresh=True)
    diary.start()
    diary.notes.append("rollouts   a server")
    diary.start_steps(0)
    assert capsys.readouterr().out == "rollouts   a server\n"
    diary.step(result(session.train_order, 0, MOVED))
    assert capsys.readouterr().out == ""


def test_steps_that_the_loss_scaler_skipped_are_counted_over_a_resume(session: Session) -> None:
    skipped = StepOutcome(moved=False, grad_norm=float("inf"), skipped_by_scaler=True)
    for number, outcome in enumerate((skipped, MOVED, skipped)):
        session.journal.step(result(session.train_order, number, outcome))
    assert session.journal.skipped == 2
    state = session.journal.state()
    session.journal.skipped = 0
    session.journal.load_state(state)
    assert session.journal.skipped == 2


def test_a_metric_that_is_not_finite_is_a_warning_once(
    session: Session, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    session.journal.folder = RunFolder(tmp_path / "run", fresh=True)
    for number in range(2):
        bad = report(kl=float("nan"), right=0.5)
        session.journal.step(result(session.train_order, number, MOVED, bad))
    session.journal.flush()
    session.journal.evaluation(2, report(margin=float("inf")))
    lines = capsys.readouterr().out.splitlines()
    assert [line for line in lines if line.startswith("warning")] == [
        "warning: step 1: the metric 'kl' is nan",
        "warning: step 2: the metric 'eval/margin' is inf",
    ]
