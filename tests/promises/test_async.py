"""Checkpoints that are written beside the steps: the same promise as those that are not."""

import errno
import json
import shutil
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import sft_runs
from rlhf.folder import checkpoints, retention
from rlhf.train import checkpointing
from rlhf.train.fragments import write_fragments
from rlhf.train.session import Writing
from rlhf_devkit import column
from rlhf_devkit.ranks import Ranks
from sft_runs import Inputs

ASYNC = ("--checkpoint.async", "true", "--train.steps", "8")
STAGE_3 = ("--deepspeed.stage", "3", "--deepspeed.persistence_threshold", "100")


def steps_beside(words: list[str], cache: str, seconds: float) -> tuple[int, int]:
    """Run with a slow disk. Returns the exit code, and how many steps found a write under way."""
    found = 0

    def slowly(*arguments: Any) -> list[Path]:
        time.sleep(seconds)
        return write_fragments(*arguments)

    def counted(session: Any, real: Any = checkpointing.complete_if_written) -> None:
        nonlocal found
        found += session.writing is not None and not session.writing.is_done
        real(session)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checkpointing, "write_fragments", slowly)
        patch.setattr("rlhf.train.loop.complete_if_written", counted)
        code, _ = sft_runs.run(words, cache)
    return code, found


def test_steps_continue_during_an_async_save_and_every_checkpoint_is_complete(
    inputs: Inputs, two: Ranks, tmp_path: Path
) -> None:
    given = ("--checkpoint.every", "3", "--checkpoint.keep", "9", *STAGE_3)
    words = sft_runs.words(inputs, tmp_path / "run", *ASYNC, *given)
    for code, found in two.run(steps_beside, words, str(inputs.cache), 0.5):
        assert code == 0
        assert found > 0
    folders = checkpoints.all_checkpoints(tmp_path / "run" / "checkpoints")
    assert [folder.name for folder in folders] == ["step-000003", "step-000006", "step-000008"]
    assert [checkpoints.damage(folder) for folder in folders] == [None] * 3


def test_a_run_that_resumes_from_a_copy_is_the_same_to_the_last_bit(
    inputs: Inputs, two: Ranks, tmp_path: Path
) -> None:
    def run(folder: str, *more: str) -> list[dict[str, Any]]:
        words = sft_runs.words(inputs, tmp_path / folder, *ASYNC, *STAGE_3, *more)
        (_, metrics), _ = two.run(sft_runs.run, words, str(inputs.cache))
        return metrics

    every = ("--checkpoint.every", "2")
    straight = run("run", "--checkpoint.every", "3", "--checkpoint.async", "false")
    run("halves", *every)
    halves = run("halves", *every, "--resume", "step-4")
    assert column(halves, "loss") == column(straight, "loss")


def failing(words: list[str], cache: str) -> None:
    """Run on a disk that is full at the second checkpoint."""
    writes = 0

    def write(*arguments: Any) -> list[Path]:
        nonlocal writes
        writes += 1
        if writes == 2:
            raise OSError(errno.ENOSPC, "No space left on device", "file")
        return write_fragments(*arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checkpointing, "write_fragments", write)
        sft_runs.run(words, cache)


@pytest.mark.parametrize("beside", ["true", "false"])
def test_an_error_of_the_writer_ends_the_run_like_an_error_of_a_save(
    inputs: Inputs, one: Ranks, tmp_path: Path, beside: str
) -> None:
    more = (*ASYNC, "--checkpoint.every", "2", "--checkpoint.async", beside)
    words = sft_runs.words(inputs, tmp_path / "run", *more)
    (error,) = one.errors(failing, words, str(inputs.cache))
    assert "cannot write to file: the disk is full" in error
    checkpoint = checkpoints.find(tmp_path / "run" / "checkpoints")
    assert checkpoint is not None
    assert checkpoint.name == "step-000002"
    metrics = sft_runs.read_metrics(tmp_path / "run")
    assert column(metrics, "step")[-1] < 8


def filling(words: list[str], cache: str) -> None:
    """Run on a disk that another program fills after the first checkpoint."""
    usage, calls = shutil.disk_usage("."), 0

    def disk_usage(path: Path) -> Any:
        nonlocal calls
        calls += 1
        # At the start, at the first save and at the second.
        return usage._replace(free=usage.free if calls < 3 else 1)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(retention.shutil, "disk_usage", disk_usage)
        sft_runs.run(words, cache)


def test_nothing_is_written_to_a_disk_without_room(
    inputs: Inputs, one: Ranks, tmp_path: Path
) -> None:
    words = sft_runs.words(inputs, tmp_path / "run", *ASYNC, "--checkpoint.every", "2")
    (error,) = one.errors(filling, words, str(inputs.cache))
    assert (
        f"{tmp_path}/run/checkpoints is on a disk with 1e-09 GB free, but a checkpoint takes"
        in error
    )
    (left,) = (tmp_path / "run" / "checkpoints").glob(".*")
    assert not list(left.iterdir())


def test_the_size_of_a_checkpoint_is_known_before_the_first_step(
    inputs: Inputs, two: Ranks, tmp_path: Path
) -> None:
    words = sft_runs.words(inputs, tmp_path / "run", *ASYNC, *STAGE_3, "--train.stop_at", "1")
    sizes = two.run(announced, words, str(inputs.cache))
    folder = checkpoints.find(tmp_path / "run" / "checkpoints")
    assert folder is not None
    files = json.loads((folder / "manifest.json").read_text())["files"]
    large = sum(file["size"] for name, file in files.items() if "rank-" in name)
    assert sizes[0] == sizes[1]
    # Of a tiny model the headers are a good part.
    assert sizes[0] == pytest.approx(large, rel=0.25)
    assert sizes[0] < large


def announced(words: list[str], cache: str) -> int:
    """Run; the bytes of a checkpoint that the run expected."""
    known = []

    def save(session: Any, step: int, real: Any = checkpointing.save) -> None:
        known.append(session.checkpoint_bytes)
        real(session, step)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("rlhf.train.loop.save", save)
        sft_runs.run(words, cache)
    return known[0]


def test_a_synchronous_write_is_done_when_it_returns() -> None:
    done: list[int] = []
    writing = Writing(partial(done.append, 1), step=1, best=None, background=False)
    assert writing.is_done
    assert done == [1]
