"""The observer's event files, read by TensorBoard itself."""

from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from rlhf.hookspecs import RunRecord
from rlhf_observer_tensorboard import TensorBoard


@pytest.fixture
def run(tmp_path: Path) -> RunRecord:
    return RunRecord(name="sft", folder=tmp_path, config=None, steps=4)  # type: ignore[arg-type]


def observe(run: RunRecord, steps: range) -> None:
    """Log these steps and an evaluation after the last one."""
    observer = TensorBoard()
    for step in steps:
        observer.on_step(run=run, step=step, metrics={"loss": 1 / step})
    observer.on_eval(run=run, step=steps[-1], metrics={"eval/loss": 0.5})
    observer.on_finish(run=run, error=None)


def curves(folder: Path) -> dict[str, list[tuple[int, float]]]:
    """Steps and values of every curve in the run folder."""
    events = EventAccumulator(str(folder / "tensorboard"))
    events.Reload()
    names = events.Tags()["scalars"]
    return {name: [(row.step, row.value) for row in events.Scalars(name)] for name in names}


def test_steps_and_evaluations_become_curves(run: RunRecord) -> None:
    observe(run, range(1, 4))
    assert curves(run.folder) == {
        "train/loss": [(1, 1.0), (2, 0.5), (3, pytest.approx(1 / 3))],
        "eval/loss": [(3, 0.5)],
    }


def test_a_resumed_run_hides_what_was_logged_after_its_checkpoint(run: RunRecord) -> None:
    observe(run, range(1, 5))
    observe(run, range(3, 5))
    assert [step for step, _ in curves(run.folder)["train/loss"]] == [1, 2, 3, 4]


def test_a_run_that_logs_nothing_leaves_no_file(run: RunRecord) -> None:
    TensorBoard().on_finish(run=run, error=None)
    assert not list(run.folder.iterdir())
