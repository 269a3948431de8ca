"""The observer's event files, read by TensorBoard itself."""

from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from rlhf_devkit import call_hooks
from rlhf_devkit.observed import PICTURED
from rlhf_observer_tensorboard.observer import TensorBoard


def curves(folder: Path) -> dict[str, list[tuple[int, float]]]:
    """Steps and values of every curve in the run folder."""
    events = EventAccumulator(str(folder / "tensorboard"))
    events.Reload()
    names = events.Tags()["scalars"]
    return {name: [(row.step, row.value) for row in events.Scalars(name)] for name in names}


def test_steps_and_evaluations_become_curves(tmp_path: Path) -> None:
    call_hooks(TensorBoard(), tmp_path, range(1, 4))
    assert curves(tmp_path) == {
        "train/loss": [(1, 1.0), (2, 0.5), (3, pytest.approx(1 / 3))],
        "eval/loss": [(3, 0.5)],
    }


def test_the_samples_of_an_evaluation_are_a_table(tmp_path: Path) -> None:
    call_hooks(TensorBoard(), tmp_path, [2])
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    (shown,) = events.Tensors("samples/text_summary")
    assert shown.step == 2
    assert shown.tensor_proto.string_val[0].decode().splitlines() == [
        "| step | row | prompt | answer | score |",
        "| --- | --- | --- | --- | --- |",
        "| 2 | rows.jsonl:1 | 1 + 1 = | 2 | 0.5 |",
        "| 2 | rows.jsonl:1 | 1 + 1 = | 3<br>\\| | -1.0 |",
    ]


def test_images_of_samples_are_shown(tmp_path: Path) -> None:
    call_hooks(TensorBoard(), tmp_path, [2], samples=PICTURED)
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    tags = ["samples/1/image 1", "samples/1/image 2"]
    assert events.Tags()["images"] == tags
    for tag in tags:
        (shown,) = events.Images(tag)
        assert (shown.step, shown.width, shown.height) == (2, 4, 2)


def test_a_resumed_run_hides_what_was_logged_after_its_checkpoint(tmp_path: Path) -> None:
    call_hooks(TensorBoard(), tmp_path, range(1, 5))
    call_hooks(TensorBoard(), tmp_path, range(3, 5))
    assert [step for step, _ in curves(tmp_path)["train/loss"]] == [1, 2, 3, 4]


def test_a_run_that_logs_nothing_leaves_no_file(tmp_path: Path) -> None:
    TensorBoard().on_finish(run=None, error=None)
    assert not list(tmp_path.iterdir())
