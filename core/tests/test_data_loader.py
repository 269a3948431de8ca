"""The order of a run and its loader: the same rows on any number of ranks and workers, from any
step, and no hang."""

import gc
import multiprocessing
import os
import signal
import subprocess
import tempfile
import time
import weakref
from itertools import islice
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import pytest
import torch
from numbered_rows import NUM_ROWS, config_in, numbered_examples, order
from torch.utils.data import _utils

from rlhf.config.sections import Config
from rlhf.data import loader
from rlhf.data.loader import batches_from
from rlhf.data.tokenise import Examples


@pytest.fixture
def config(tmp_path: Path, cache: Path) -> Config:
    return config_in(tmp_path)


@pytest.fixture
def examples(config: Config) -> Examples:
    return numbered_examples(config)


def test_every_rank_plans_the_same_step_and_takes_its_part(
    examples: Examples, config: Config
) -> None:
    for number in (0, 5, 6, 11):
        single = order(examples, config).step(number)
        plans = [order(examples, config, rank, 3).step(number) for rank in range(3)]
        for plan in plans:
            assert list(plan.rows) == list(single.rows)
            assert plan.totals == single.totals
            assert len(plan.micro) == len(plans[0].micro)
        taken = [row for plan in plans for rows in plan.micro for row in rows]
        assert sorted(taken) == sorted(single.rows)


def test_totals_are_counted_before_any_batch_is_made(examples: Examples, config: Config) -> None:
    plan = order(examples, config).step(2)
    assert plan.totals["examples"] == plan.totals["answers"] == 10
    assert plan.totals["tokens"] == sum(plan.lengths - 2)
    assert plan.totals["labels"] == 0


def test_the_last_step_of_an_epoch_takes_the_remainder(examples: Examples, config: Config) -> None:
    course = order(examples, config)
    assert course.steps_per_epoch == 6
    assert [len(course.step(number).rows) for number in range(7)] == [10] * 5 + [3, 10]
    assert [course.step(number).epoch for number in (5, 6)] == [0, 1]
    assert course.step(5).epoch_done == 1.0
    for epoch in range(2):
        rows = np.concatenate([course.step(epoch * 6 + place).rows for place in range(6)])
        assert sorted(rows) == list(range(NUM_ROWS))


@pytest.mark.parametrize("workers", [0, 2])
def test_batches_come_in_the_order_of_the_plan_from_any_step(
    examples: Examples, config: Config, workers: int
) -> None:
    course = order(examples, config, 1, 2)
    for first in (0, 4):
        source = batches_from(course, first_step=first, workers=workers)
        for number in range(first, first + 9):
            for rows in course.step(number).micro:
                batch = next(source)
                assert batch.rows == tuple(rows)
                assert len(batch.values["weight"]) == len(rows)
        del source


@pytest.mark.parametrize("workers", [0, 1])
def test_a_batch_comes_as_it_was_packed(examples: Examples, config: Config, workers: int) -> None:
    course = order(examples, config)
    packed = course[course.step(0).micro[0]]
    batch = next(batches_from(course, workers=workers))
    for name, value in attrs.asdict(packed, recurse=False).items():
        received = getattr(batch, name)
        assert type(received) is type(value)
        if isinstance(value, torch.Tensor):
            assert received.dtype == value.dtype
            assert torch.equal(received, value)
        elif name == "values":
            assert torch.equal(received["weight"], value["weight"])
        else:
            assert received == value


def test_evaluation_reads_every_row_once(examples: Examples, config: Config) -> None:
    courses = [order(examples, config, rank, 2, shuffle=False) for rank in range(2)]
    steps = [course.step(number) for course in courses for number in range(course.steps_per_epoch)]
    seen = [row for step in steps for micro in step.micro for row in micro]
    assert sorted(seen) == list(range(NUM_ROWS))


def test_accelerators_see_few_lengths_within_the_budget(examples: Examples, config: Config) -> None:
    course = order(examples, config, round_to=8)
    lengths = {len(next(batches_from(course, first_step=n)).tokens) for n in range(12)}
    assert lengths <= {8, 16, 24, 32, 40}


class Deadly(Examples):
    """Kills the process that reads example 5."""

    def __getitem__(self, number: Any) -> Any:
        if number == 5:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().__getitem__(number)


def test_a_worker_that_dies_is_an_error_and_no_hang(
    examples: Examples, config: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A killed process cannot remove the folder of its sockets.
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    deadly = Deadly(*examples.__reduce__()[1])
    course = order(deadly, config, shuffle=False)
    with pytest.raises(RuntimeError, match="DataLoader worker"):
        list(batches_from(course, workers=1))


def test_a_worker_dies_with_its_run(examples: Examples, config: Config) -> None:
    course = order(examples, config, shuffle=False)
    slow = course.step(0).micro[1]

    class Slow(Examples):
        def __getitem__(self, number: Any) -> Any:
            time.sleep(60.0 * (number in slow))
            return super().__getitem__(number)

    course = attrs.evolve(course, examples=Slow(*examples.__reduce__()[1]))
    fork = multiprocessing.get_context("fork")
    pids = fork.SimpleQueue()

    def run() -> None:
        batches = batches_from(course, workers=1)
        next(batches)
        pids.put(multiprocessing.active_children()[0].pid)
        time.sleep(60)

    killed = fork.Process(target=run)
    killed.start()
    worker = Path(f"/proc/{pids.get()}/exe")
    killed.kill()
    killed.join()
    deadline = time.monotonic() + 120
    while _alive(worker) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not _alive(worker)


def test_a_worker_outlives_a_stop_signal_but_not_its_run(
    examples: Examples, config: Config
) -> None:
    course = order(examples, config)
    fork = multiprocessing.get_context("fork")
    kept = []

    def run() -> None:
        kept.append(batches_from(course, workers=1))
        next(kept[0])
        (worker,) = multiprocessing.active_children()
        # Another process than the worker's parent sends it.
        subprocess.run(["kill", "-TERM", str(worker.pid)], check=True)
        worker.join(0.5)
        assert worker.is_alive()
        next(kept[0])

    # Its end does not shut the loader down, which is still referred to.
    ends = fork.Process(target=run)
    ends.start()
    ends.join(loader.START_SECONDS + 20)
    assert ends.exitcode == 0


def test_a_run_ends_although_a_worker_does_not_get_its_signal(
    examples: Examples, config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loader, "_end_with_loader", lambda parent, stopping: None)
    course = order(examples, config)
    kept = []

    def run() -> None:
        kept.append(batches_from(course, workers=1))
        next(kept[0])

    ends = multiprocessing.get_context("fork").Process(target=run)
    ends.start()
    ends.join(loader.START_SECONDS + 20)
    hangs = ends.exitcode is None
    ends.kill()
    assert not hangs


def test_nothing_is_kept_of_a_worker_that_has_ended(examples: Examples, config: Config) -> None:
    others = set(multiprocessing.active_children())  # Earlier tests may have left some.
    batches = batches_from(order(examples, config, shuffle=False), workers=1)
    (worker,) = map(weakref.ref, {*multiprocessing.active_children()} - others)
    assert worker() is not None
    assert next(batches)
    del batches
    gc.collect()
    assert {*multiprocessing.active_children()} <= others
    assert worker() is None


def _alive(executable: Path) -> bool:
    """Return whether a process exists and is not a zombie, which has no executable."""
    try:
        return bool(executable.readlink())
    except FileNotFoundError:
        return False


def test_a_worker_that_hangs_in_its_fork_is_replaced(
    examples: Examples, config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loader, "START_SECONDS", 1)
    monkeypatch.setattr(_utils, "MP_STATUS_CHECK_INTERVAL", 0.2)
    hanging = [True]

    def hang() -> None:
        """Ignore SIGTERM, as a process does in which no Python code runs."""
        if hanging:
            signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
            time.sleep(600)

    os.register_at_fork(after_in_parent=hanging.clear, after_in_child=hang)
    course = order(examples, config)
    batch = next(batches_from(course, workers=1))
    assert batch.rows == tuple(course.step(0).micro[0])


def test_a_slow_batch_is_waited_for(
    examples: Examples, config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loader, "START_SECONDS", 1)

    class Slow(Examples):
        def __getitem__(self, number: Any) -> Any:
            time.sleep(2.0 * (number == 0))
            return super().__getitem__(number)

    slow = Slow(*examples.__reduce__()[1])
    course = order(slow, config, shuffle=False)
    assert next(batches_from(course, workers=1)).rows[0] == 0


def test_workers_keep_to_one_thread_and_to_their_own_garbage(
    examples: Examples, config: Config
) -> None:
    class Threads(Examples):
        def __getitem__(self, number: Any) -> Any:
            assert torch.get_num_threads() == 1
            assert gc.get_freeze_count()
            return super().__getitem__(number)

    course = order(Threads(*examples.__reduce__()[1]), config, shuffle=False)
    assert len(list(islice(batches_from(course, workers=1), 5))) == 5


def test_rows_are_named_by_file_and_line(examples: Examples, config: Config) -> None:
    path = config.data.train[0].path
    assert order(examples, config).examples.names([0, 7]) == f"{path} line 1, {path} line 8"
    assert order(examples, config).examples.names(range(9)).endswith(f"{path} line 5 and 4 more")
