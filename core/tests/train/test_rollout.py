"""The door for on-policy methods: what a trainer makes of a step is laid out and packed."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import pytest
import torch
from attrs import asdict

from rlhf.config.sections import BatchConfig, Config, RolloutsConfig, TrainConfig
from rlhf.data.example import Answer, Example
from rlhf.data.layout import groups_by_length
from rlhf.data.order import RunOrder
from rlhf.data.packing import divided
from rlhf.engine import Mesh
from rlhf.errors import RLHFError
from rlhf.launch.places import Marker
from rlhf.train.ahead import Ahead
from rlhf.train.rollout import FILE, Rollouts
from rlhf.train.set_up import check_rollouts
from rlhf.trainer import Sample, Trainer, answer_seeds


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


def rollouts(trainer: Any, rank: int = 0, lag: int = 0, **options: int) -> Rollouts:
    rows = order(rank, **options)
    config = attrs.evolve(rows.config, rollouts=RolloutsConfig(lag=lag))
    ahead = Ahead(getattr(trainer, "begin", None))  # type: ignore[arg-type]
    return Rollouts(trainer, attrs.evolve(rows, config=config), Mesh(), Marker(None, 0), 18, ahead)


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
        Example([9], answers, {"solved": solved, "kept": [1.0, kept], "mark": label})
        for solved, kept in ((1.0, 0.0), (0.0, 1.0))
    ]
    plan, _ = order(ranks=1).step_of(made, np.arange(2))
    counts = {"examples": 2.0, "answers": 4.0, "tokens": 6.0, "labels": 6.0}
    assert plan.totals == {**counts, "solved": 1.0, "kept": 3.0}


@pytest.mark.parametrize("value", [7.0, [7.0]])
def test_a_value_with_the_name_of_a_count_is_an_error(value: Any) -> None:
    with pytest.raises(RLHFError) as error:
        order(ranks=1).step_of([Example([9], [Answer([1, 2])], {"tokens": value})], np.arange(1))
    assert str(error.value) == "rollout() returned a value 'tokens', a count of core; rename it"


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


class Lagging(Doubling):
    """Notes what is asked of the engine, and when the answers are there."""

    def __init__(self) -> None:
        super().__init__(batches=2, passes=3)
        self.events: list[tuple[str, int]] = []
        """`begin`, `there` or `used`, and the first seed of the rollout."""
        self.course: Rollouts
        self.versions: list[int | None] = []
        """Of the answers of each rollout."""

    def draws(self, examples: Sequence[Example], seeds: list[int]) -> dict[str, Any]:
        return {"seeds": seeds}

    def begin(self, *, seeds: list[int]) -> Callable[[], list[Sample]]:
        self.events.append(("begin", seeds[0]))

        def wait() -> list[Sample]:
            self.events.append(("there", seeds[0]))
            return [Sample([seed % 100], [-seed / 7]) for seed in seeds]

        return wait

    def rollout(self, examples: Sequence[Example], step: int, seeds: list[int]) -> list[Example]:
        self.events.append(("used", seeds[0]))
        samples = self.course.ahead.take(seeds)
        assert samples is not None
        assert [it.logprobs for it in samples] == [[-seed / 7] for seed in seeds]
        self.versions.append(samples[0].version)
        return super().rollout(examples, step, seeds)


def lagging() -> tuple[Lagging, Rollouts]:
    trainer = Lagging()
    trainer.course = rollouts(trainer, lag=1, tokens=64, num_rows=8, ranks=1)
    return trainer, trainer.course


def test_with_a_lag_the_step_alone_says_which_weights_write_which_answers(tmp_path: Path) -> None:
    trainer, course = lagging()
    plans = [course.step(number)[0].rows.tolist() for number in range(18)]
    # Rollouts before steps 0, 6, 9 and 15, each with the weights before the one before it.
    assert [step for step, _ in trainer.calls] == [0, 6, 9, 15]
    assert trainer.versions == [0, 0, 6, 9]
    first, second, third, last = (seeds[0] for _, seeds in trainer.calls)
    # The answers of the next rollout may be under way until it begins. The last one has none.
    assert trainer.events == [
        ("begin", first), ("there", first), ("begin", second), ("used", first),
        ("there", second), ("begin", third), ("used", second),
        ("there", third), ("begin", last), ("used", third),
        ("there", last), ("used", last),
    ]  # fmt: skip
    for stop in range(1, 18):
        folder = tmp_path / str(stop)
        folder.mkdir()
        before, stopped = lagging()
        for number in range(stop):
            stopped.step(number)
        stopped.finish(stop)
        stopped.save(folder, stop)
        after, continued = lagging()
        continued.load(folder, stop)
        again = [continued.step(number)[0].rows.tolist() for number in range(stop, 18)]
        assert again == plans[stop:]
        assert before.versions + after.versions == trainer.versions
        begun = [seed for kind, seed in before.events + after.events if kind == "begin"]
        assert begun == [first, second, third, last]


def test_answers_ahead_that_no_rollout_asks_for_are_refused() -> None:
    class Straying(Lagging):
        def draws(self, examples: Sequence[Example], seeds: list[int]) -> dict[str, Any]:
            return {"seeds": [seed + 1 for seed in seeds]}

        def rollout(
            self, examples: Sequence[Example], step: int, seeds: list[int]
        ) -> list[Example]:
            assert self.course.ahead.take(seeds) is None
            return Doubling.rollout(self, examples, step, seeds)

    trainer = Straying()
    trainer.course = rollouts(trainer, lag=1, tokens=64, num_rows=8, ranks=1)
    with pytest.raises(RLHFError) as error:
        trainer.course.step(0)
    assert str(error.value) == (
        "step 1: Straying.draws() returned other seeds than rollout() passes to Run.sample; "
        "return the same"
    )


def test_recorded_answers_are_not_drawn_ahead() -> None:
    course = rollouts(Doubling(), lag=1, ranks=1)
    config = attrs.evolve(course.order.config, rollouts=RolloutsConfig(lag=1, replay="runs/1"))
    # The trainer has no `draws`.
    attrs.evolve(course, order=attrs.evolve(course.order, config=config)).step(0)
    with pytest.raises(AttributeError):
        course.step(0)


class Plain(Trainer):
    """Makes examples without `draws`."""

    example = setup = loss = rollout = None  # type: ignore[assignment]


def test_a_lag_is_refused_for_a_trainer_that_does_not_say_what_it_draws() -> None:
    trainer = Plain(None, None)
    check_rollouts("mine", trainer, Config())
    with pytest.raises(RLHFError) as error:
        check_rollouts("mine", trainer, Config(rollouts=RolloutsConfig(lag=1)))
    assert str(error.value) == ("rollouts.lag: trainer 'mine' cannot draw answers ahead; remove it")
