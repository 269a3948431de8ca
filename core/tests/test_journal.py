"""What a run tells of its steps: how fast they were, and how many the loss scaler skipped."""

from pathlib import Path

import pytest
import torch

from rlhf.engine import Mesh, StepOutcome
from rlhf.journal import journal
from rlhf.journal.sums import Sums
from rlhf.loop.session import Session
from rlhf.testing import tiny
from rlhf.trainer import Loss


@pytest.fixture
def session(tmp_path: Path) -> Session:
    words = [*tiny.short_run(tmp_path, "demonstration"), "--output", str(tmp_path / "run")]
    return tiny.in_plain_torch("sft", words, str(tmp_path / "cache"))[1]


def test_the_time_of_an_evaluation_is_not_that_of_steps(
    session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 100.0
    monkeypatch.setattr(journal.time, "perf_counter", lambda: now)
    diary, order = session.journal, session.train_order
    sums = Sums(Mesh())
    sums.add(Loss(()), torch.tensor(1.0))
    report = sums.reduce({})
    diary.start(0)
    now += 2
    diary.step(1, order.step(0), [order.packed(order.step(0).micro[0])], None)
    diary.evaluating()
    now += 1000
    diary.evaluated(1, report)
    now += 3
    diary.outcome(StepOutcome(moved=True, grad_norm=1.0), 0.1)
    diary.step(2, order.step(1), [order.packed(order.step(1).micro[0])], report)
    tokens = sum(int(order.step(number).lengths.sum()) for number in range(2))
    assert diary._pending is not None
    assert diary._pending.host["tokens_per_s"] == pytest.approx(tokens / 5)


def test_steps_that_the_loss_scaler_skipped_are_counted_over_a_resume(session: Session) -> None:
    skipped = StepOutcome(moved=False, grad_norm=float("inf"), skipped_by_scaler=True)
    for outcome in (skipped, StepOutcome(moved=True, grad_norm=1.0), skipped):
        session.journal.outcome(outcome, 0.1)
    assert session.journal.skipped == 2
    assert session._state(3)["skipped"] == 2
