"""The door for on-policy methods: what a trainer makes of a step is laid out and packed."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import pytest
import torch
from attrs import asdict

from rlhf.config.sections import BatchConfig, Config, TrainConfig
from rlhf.data.example import Answer, Example
from rlhf.data.layout import groups_by_length
from rlhf.data.order import RunOrder
from rlhf.data.packing import divided
from rlhf.engine import Mesh
from rlhf.errors import RLHFError
from rlhf.launch.places import Marker
from rlhf.train.rollout import FILE, Rollouts
from rlhf.trainer import answer_seeds


class Rows(list[Example]):
    """Examples with names."""

    def name(self, number: int) -> str:
        return f"rows.jsonl line {number + 1}"


class Doubling:
    """Answers twice as long, whose second half is not trained on, with a value per token."""

    def __init__(self, batches: int = 1, passes: int = 1) -> None:
        self.rollout_batches, self.rollout_passes = batches, passes
        self.calls: list[tuple[int, list[int]]] = []
        """Step and seeds of each rollout."""

    def rollout(self, examples: Sequence[Example], step: int, seeds: list[int]) -> list[Example]:
        self.calls.append((step, seeds))
        return [self.made(example) for example in examples]

    def needs_survey(self) -> bool:
        return False

    def made(self, example: Example) -> Example:
        tokens = list(example.answers[0].tokens)
        trained = [True] * len(tokens) + [False] * len(tokens)
        values = [[float("nan")] * len(tokens) + [0.1] * len(tokens)]
        return Example(example.prompt, [Answer(tokens * 2, trained)], {"mark": values})


def order(rank: int = 0, *, tokens: int = 16, num_rows: int = 4, ranks: int = 2) -> RunOrder:
    rows = Rows(Example([9], [Answer([n + 1] * (n + 1))]) for n in range(num_rows))
    given: Any = rows
    config = Config(batch=BatchConfig(size=3, tokens=tokens), train=TrainConfig(seed=1))
    return RunOrder(examples=given, config=config, rank=rank, ranks=ranks)


def rollouts(trainer: Any, rank: int = 0, **options: int) -> Rollouts:
    return Rollouts(trainer, order(rank, **options), Mesh(), Marker(None, 0))


def test_new_examples_are_laid_out_and_packed() -> None:
    rows = order().rows(0)
    shares = [rollouts(Doubling(), rank).step(0) for rank in range(2)]
    for plan, batches in shares:
        assert plan.rows.tolist() == rows.tolist()
        assert plan.lengths.tolist() == [1 + 2 * (row + 1) for row in rows]
        assert [batch.rows for batch in batches] == [tuple(rows) for rows in plan.micro]
        assert all(len(batch.tokens) <= 16 for batch in batches)
    seen = sorted(row for _, batches in shares for batch in batches for row in batch.rows)
    assert seen == sorted(rows)
    largest = max(seen)
    first = next(batch for batch in shares[0][1] + shares[1][1] if largest in batch.rows)
    assert largest + 1 in first.tokens


def test_totals_are_counted_from_the_new_examples() -> None:
    counts = [rollouts(Doubling(), rank).step(0)[0].totals for rank in range(2)]
    answers = float(sum(order().rows(0) + 1))
    whole = {"examples": 3.0, "answers": 3.0, "tokens": answers, "labels": answers}
    assert counts == [whole, whole]


def test_the_sum_of_a_value_per_example_or_answer_is_a_count_of_the_step() -> None:
    answers = [Answer([1, 2]), Answer([3])]
    label = [[0.5, 0.5], [0.5]]
    made = [
        Example([9], answers, {"tokens": 7.0, "solved": solved, "kept": [1.0, kept], "mark": label})
        for solved, kept in ((1.0, 0.0), (0.0, 1.0))
    ]
    plan, _ = order(ranks=1).step_of(made, np.arange(2))
    counts = {"examples": 2.0, "answers": 4.0, "tokens": 6.0, "labels": 6.0}
    assert plan.totals == {**counts, "solved": 1.0, "kept": 3.0}


def test_an_answer_beyond_the_budget_is_an_error_with_its_row() -> None:
    with pytest.raises(RLHFError) as error:
        rollouts(Doubling(), tokens=8, num_rows=6, ranks=1).step(0)
    row = next(row for row in order(num_rows=6).rows(0) if row > 2)
    assert str(error.value) == (
        f"with its new answer rows.jsonl line {row + 1} has {3 + 2 * row} tokens but batch.tokens "
        f"is 8; set batch.tokens to at least {3 + 2 * row}, or generate fewer tokens"
    )


class Several(Doubling):
    """Three answers to each prompt, with values per answer and per token."""

    def made(self, example: Example) -> Example:
        row = float(example.answers[0].tokens[0])
        answers = [Answer([int(row)] * size) for size in (4, 3, 2)]
        return Example(
            [9, 9], answers, {"kept": [row, 1.0, 0.0], "mark": [[row] * 4, [2.0] * 3, [3.0] * 2]}
        )


def test_a_tree_that_is_larger_than_the_budget_is_divided_with_the_same_sums() -> None:
    whole, batches = rollouts(Several(), tokens=64, ranks=1).step(0)
    plan, parts = rollouts(Several(), tokens=8, ranks=1).step(0)
    assert plan.totals == whole.totals
    assert plan.lengths.tolist() == [11, 11, 11]
    assert all(len(batch.tokens) <= 8 for batch in parts)
    assert (
        sorted(answers for batch in parts for _, answers in batch.spans)
        == [(3, 2)] * 3 + [(4,)] * 3
    )
    for name in ("kept", "mark"):
        sums = [sum(b.values[name].nansum().item() for b in each) for each in (parts, batches)]
        assert sums[0] == sums[1]
    marks = [batch.values["mark"][batch.predict_at] for batch in parts]
    assert not any(mark.isnan().any() for mark in marks)


def test_a_tree_with_a_value_of_its_own_is_not_divided() -> None:
    example = attrs.evolve(Several().made(Example([], [Answer([1])])), values={"margin": 1.0})
    assert divided(example, 8) == [example]


def test_each_answer_has_a_seed_of_its_own() -> None:
    assert answer_seeds([10, 20], 3) == [10, 11, 12, 20, 21, 22]


def test_the_examples_of_a_rollout_serve_several_steps_in_several_passes() -> None:
    trainer = Doubling(batches=2, passes=3)
    course = rollouts(trainer, tokens=64, num_rows=8, ranks=1)
    # An epoch has the batches of 3, 3 and 2 rows: a block of two, and one of the last alone.
    plans = [course.step(number)[0] for number in range(18)]
    assert [step for step, _ in trainer.calls] == [0, 6, 9, 15]
    assert [plan.epoch for plan in plans] == [0] * 9 + [1] * 9
    assert plans[8].epoch_done == 1.0
    rows = [plan.rows.tolist() for plan in plans]
    assert rows[:2] == [course.order.rows(number).tolist() for number in range(2)]
    assert rows[6:9] == [rows[6], rows[7], rows[8]]
    for first in (0, 2, 4):
        assert sorted(rows[first] + rows[first + 1]) == sorted(rows[0] + rows[1])
    assert rows[2] != rows[0] != rows[4]
    assert rows[9:11] == [course.order.rows(number).tolist() for number in (3, 4)]


def test_each_row_has_another_seed_in_each_epoch_and_the_same_in_each_evaluation() -> None:
    trainer = Doubling()
    course = rollouts(trainer, tokens=64, num_rows=6, ranks=1)
    for number in range(4):
        course.step(number)
    for step in (5, 9):
        course.held_out(course.order, 1, step=step)
    drawn, held_out = trainer.calls[:4], trainer.calls[4:]
    assert len({seed for _, seeds in drawn for seed in seeds}) == 12
    assert [step for step, _ in held_out] == [5, 9]
    assert held_out[0][1] == held_out[1][1]
    assert not {*held_out[0][1]} & {seed for _, seeds in drawn for seed in seeds}


def test_a_rollout_that_steps_still_need_is_saved_to_the_last_bit(tmp_path: Path) -> None:
    def course() -> Rollouts:
        return rollouts(Doubling(batches=2, passes=2), tokens=64, num_rows=6, ranks=1)

    straight, stopped = course(), course()
    expected = [straight.step(number) for number in range(4)]
    for number in range(3):
        stopped.step(number)
    assert stopped.save(tmp_path, 3) == [tmp_path / FILE]
    continued = course()
    continued.load(tmp_path, 3)
    plan, batches = continued.step(3)
    other: Any = continued.trainer
    assert not other.calls
    assert plan.rows.tolist() == expected[3][0].rows.tolist()
    for batch, known in zip(batches, expected[3][1], strict=True):
        for name, value in asdict(known).items():
            torch.testing.assert_close(asdict(batch)[name], value, rtol=0, atol=0, equal_nan=True)
    stopped.step(3)
    assert stopped.save(tmp_path, 4) == []


def test_prompts_of_like_length_run_together_within_the_budget() -> None:
    assert groups_by_length([5, 11, 6, 10], 22) == [[1, 3], [2, 0]]
    assert groups_by_length([52, 3], 22) == [[0], [1]]
    assert groups_by_length([], 22) == []
