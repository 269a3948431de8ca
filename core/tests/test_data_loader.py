"""The order of a run and its loader: the same rows on any number of ranks and workers, from any
step, and no hang."""

import gc
import json
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
from attrs import frozen
from torch.utils.data import _utils

import rlhf.data.order
from rlhf.config.sections import BatchConfig, Config, DataConfig, DataEntry, TrainConfig
from rlhf.data import loader
from rlhf.data.example import Answer, Example
from rlhf.data.loader import batches_from
from rlhf.data.order import RunOrder
from rlhf.data.tokenise import Examples, prepare
from rlhf.memory.rehearsal import largest
from rlhf.trainer import Trainer

NUM_ROWS = 53


class Numbers(Trainer):
    """Rows of different lengths."""

    row_format = None

    def example(self, row: Any) -> Example:
        if row["number"] == self.config.deadly:
            return Example([1], [Answer([1])], {"weight": 1.0})
        length = 1 + row["number"] * 7 % 13
        return Example([row["number"]] * 2, [Answer([row["number"]] * length)], {"weight": 1.0})

    def setup(self, run: Any) -> None: ...
    def loss(self, batch: Any) -> Any: ...


@frozen
class Section:
    """A section without meaning."""

    deadly: int = -1


class NoTokenizer:
    """Raw rows need none; the cache reads its vocabulary."""

    is_fast = False
    special_tokens_map: dict[str, str] = {}  # noqa: RUF012
    chat_template = None
    eos_token_id = bos_token_id = bos_token = None
    added_tokens_decoder: dict[int, Any] = {}  # noqa: RUF012
    all_special_ids: list[int] = []  # noqa: RUF012

    def get_vocab(self) -> dict[str, int]:
        return {}

    def __call__(self, text: Any, **keywords: Any) -> dict[str, list[int]]:
        return {"input_ids": [0]}


@pytest.fixture
def config(tmp_path: Path, cache: Path) -> Config:
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps({"number": n}) + "\n" for n in range(NUM_ROWS)))
    return Config(
        data=DataConfig(train=(DataEntry(path=str(path)),)),
        batch=BatchConfig(size=10, tokens=40),
        train=TrainConfig(seed=4),
    )


@pytest.fixture
def examples(config: Config) -> Examples:
    return prepare(config, Numbers(Section(), None), NoTokenizer(), which="train")


class Shifted:
    """Each prompt with the answer of another row, so many places further on."""

    def __init__(self, examples: Examples, shift: int) -> None:
        self.examples, self.others = examples, np.roll(np.arange(len(examples)), shift)
        self.lengths = self.longest_path = examples.longest_path[self.others]
        self.value_kinds = examples.value_kinds

    def __len__(self) -> int:
        return len(self.examples)

    def __getitem__(self, number: int) -> Example:
        other = self.examples[int(self.others[number])]
        return Example(self.examples[number].prompt, other.answers, {"weight": 1.0})


class Surveying(Numbers):
    """A survey of each prompt with another row's answer."""

    def survey_examples(self, examples: Examples, draw: np.random.Generator) -> Shifted:
        return Shifted(examples, int(draw.integers(1, len(examples))))

    def survey(self, batch: Any) -> Any: ...


class Averaging(Numbers):
    """A survey of the loss's own examples."""

    def survey(self, batch: Any) -> Any: ...


def order(
    examples: Examples, config: Config, rank: int = 0, ranks: int = 1, **keywords: Any
) -> RunOrder:
    return RunOrder(examples=examples, config=config, rank=rank, ranks=ranks, **keywords)


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
def test_a_survey_with_examples_of_its_own_comes_before_the_loss_of_each_step(
    examples: Examples, config: Config, workers: int
) -> None:
    trainer = Surveying(Section(), None)
    courses = [order(examples, config, rank, 2, trainer=trainer) for rank in range(2)]
    sources = [batches_from(course, workers=workers) for course in courses]
    paired: list[dict[int, int]] = [{}, {}]
    most = 0
    for number in range(12):
        plans = [course.step(number) for course in courses]
        assert len(plans[0].survey) == len(plans[1].survey)
        assert {plan.num_batches for plan in plans} == {len(plans[0].survey) + len(plans[0].micro)}
        for plan, source in zip(plans, sources, strict=True):
            for part in plan.survey:
                batch = next(source)
                assert batch.rows == tuple(part.rows)
                assert len(batch.tokens) <= 4 * config.batch.tokens
                prompts = batch.tokens[batch.branch == 0].tolist()[::2] if batch.rows else []
                answers = batch.tokens[batch.answer_end].tolist()
                paired[plan.epoch] |= dict(zip(prompts, answers, strict=True))
            assert [next(source).rows for _ in plan.micro] == [tuple(rows) for rows in plan.micro]
        assert len(plans[0].survey) == 1
        most = max(most, len(plans[0].micro))
    assert most > 1
    for pairs in paired:
        assert sorted(pairs) == sorted(pairs.values()) == list(range(NUM_ROWS))
        assert all(prompt != answer for prompt, answer in pairs.items())
    assert paired[0] != paired[1]


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_survey_of_the_loss_s_examples_has_fewer_micro_batches(
    examples: Examples, config: Config, ranks: int
) -> None:
    trainer = Averaging(Section(), None)
    plans = [order(examples, config, rank, ranks, trainer=trainer).step(0) for rank in range(ranks)]
    seen = [row for plan in plans for part in plan.survey for row in part.rows]
    assert sorted(seen) == sorted(plans[0].rows)
    for plan in plans:
        assert (len(plan.survey), len(plan.micro)) == ((1, 3) if ranks == 1 else (1, 2))
    for part in plans[0].survey:
        assert order(examples, config, 0, ranks, trainer=trainer)[part].rows == tuple(part.rows)


def test_a_survey_s_micro_batches_stop_growing_where_it_gains_nothing(
    examples: Examples, config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    def sizes(most: int) -> list[int]:
        monkeypatch.setattr(rlhf.data.order, "SURVEY_TOKENS", most)
        course = order(examples, config, trainer=Averaging(Section(), None))
        return [len(course[part].tokens) for part in course.step(0).survey]

    assert [len(sizes(most)) for most in (200, 60, 10)] == [1, 2, 3]
    assert 40 < max(sizes(60)) <= 60
    assert max(sizes(10)) <= 40


def test_an_example_of_the_survey_may_be_longer_than_a_micro_batch(
    examples: Examples, config: Config
) -> None:
    class Long(Shifted):
        def __init__(self, examples: Examples, shift: int) -> None:
            super().__init__(examples, shift)
            self.lengths = self.longest_path = np.full(len(examples), 5 * config.batch.budget)

    class Lengthening(Surveying):
        def survey_examples(self, examples: Examples, draw: np.random.Generator) -> Shifted:
            return Long(examples, 1)

    plan = order(examples, config, trainer=Lengthening(Section(), None)).step(0)
    assert [len(part.rows) for part in plan.survey] == [1] * 10


def test_a_survey_sees_the_micro_batch_of_a_loss_that_has_one(
    examples: Examples, config: Config
) -> None:
    config = attrs.evolve(config, batch=BatchConfig(size=10, tokens=200))
    plan = order(examples, config, trainer=Averaging(Section(), None)).step(0)
    assert (len(plan.survey), len(plan.micro)) == (0, 1)


@pytest.mark.parametrize("kind", [Surveying, Averaging])
def test_the_memory_of_a_step_is_counted_for_the_survey_s_largest_micro_batch(
    examples: Examples, config: Config, kind: type[Numbers]
) -> None:
    course = order(examples, config, trainer=kind(Section(), None))
    parts = [part for number in range(12) for part in course.step(number).survey]
    most = max(len(course[part].tokens) for part in parts)
    found = largest(course, 12)
    assert found.survey is not None
    assert len(found.survey.tokens) == most > config.batch.tokens >= len(found.loss.tokens)
    assert largest(order(examples, config), 12).survey is None


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
