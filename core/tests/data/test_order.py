"""The order of a run and its loader: the same rows on any number of ranks and threads, from any
step."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import pytest
import torch
from numbered_rows import NUM_ROWS, config_in, numbered_examples, order

from rlhf.config.sections import Config
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


class Failing(Examples):
    """Raises at example 5."""

    def __getitem__(self, number: Any) -> Any:
        if number == 5:
            raise RuntimeError("example 5 is damaged")
        return super().__getitem__(number)


@pytest.mark.parametrize("workers", [0, 1, 2])
def test_what_a_thread_raises_is_raised_in_the_step(
    examples: Examples, config: Config, workers: int
) -> None:
    course = order(Failing(*examples.__reduce__()[1]), config, shuffle=False)
    source = batches_from(course, workers=workers)
    with pytest.raises(RuntimeError, match="example 5 is damaged"):
        list(islice(source, 20))


def test_threads_end_with_their_run(examples: Examples, config: Config) -> None:
    before = {*threading.enumerate()}
    source = batches_from(order(examples, config), workers=2)
    next(source)
    threads = {*threading.enumerate()} - before
    assert threads
    assert all(thread.daemon for thread in threads)
    del source
    for thread in threads:
        thread.join(timeout=60)
        assert not thread.is_alive()


def test_threads_pack_only_a_little_ahead(examples: Examples, config: Config) -> None:
    read: list[int] = []

    class Noted(Examples):
        def __getitem__(self, number: Any) -> Any:
            read.append(number)
            return super().__getitem__(number)

    course = order(Noted(*examples.__reduce__()[1]), config, shuffle=False)
    sizes = [len(rows) for n in range(6) for rows in course.step(n).micro]
    source = batches_from(course, workers=1)
    next(source)
    most = sum(sizes[: 1 + 3])
    deadline = time.monotonic() + 60
    while len(read) < sum(sizes[:3]) and time.monotonic() < deadline:
        time.sleep(0.01)
    time.sleep(0.2)
    assert sum(sizes[:3]) <= len(read) <= most < len(examples)
    del source


def test_an_order_is_the_same_for_threads_in_two_epochs(examples: Examples, config: Config) -> None:
    """The step is at the end of an epoch while a thread packs the beginning of the next one."""
    course = order(examples, config)
    last = course.steps_per_epoch - 1
    expected = [order(examples, config).step(n).rows.tolist() for n in (last, last + 1)]

    def rows_of(number: int) -> list[list[int]]:
        return [course.step(number).rows.tolist() for _ in range(300)]

    with ThreadPoolExecutor(2) as threads:
        found = [*threads.map(rows_of, (last, last + 1))]
    assert found == [[rows] * 300 for rows in expected]


def test_rows_are_named_by_file_and_line(examples: Examples, config: Config) -> None:
    path = config.data.train[0].path
    assert order(examples, config).examples.names([0, 7]) == f"{path} line 1, {path} line 8"
    assert order(examples, config).examples.names(range(9)).endswith(f"{path} line 5 and 4 more")
