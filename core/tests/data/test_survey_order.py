"""The micro-batches of a survey: larger than those of the loss, on all ranks alike, and counted."""

from pathlib import Path
from typing import Any

import attrs
import numpy as np
import pytest
from numbered_rows import NUM_ROWS, Numbers, Section, config_in, numbered_examples, order

import rlhf.data.order
from rlhf.config.sections import BatchConfig, Config
from rlhf.data.example import Example
from rlhf.data.loader import batches_from
from rlhf.data.tokenise import Examples
from rlhf.memory.rehearsal import largest


@pytest.fixture
def config(tmp_path: Path, cache: Path) -> Config:
    return config_in(tmp_path)


@pytest.fixture
def examples(config: Config) -> Examples:
    return numbered_examples(config)


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


@pytest.mark.parametrize("workers", [0, 2])
def test_a_survey_with_examples_of_its_own_comes_before_the_loss_of_each_step(
    examples: Examples, config: Config, workers: int
) -> None:
    trainer = Surveying(Section(), None)
    courses = [
        order(examples, config, rank, 2, draw_survey=trainer.survey_examples) for rank in range(2)
    ]
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
    plans = [
        order(examples, config, rank, ranks, draw_survey=trainer.survey_examples).step(0)
        for rank in range(ranks)
    ]
    seen = [row for plan in plans for part in plan.survey for row in part.rows]
    assert sorted(seen) == sorted(plans[0].rows)
    for plan in plans:
        assert (len(plan.survey), len(plan.micro)) == ((1, 3) if ranks == 1 else (1, 2))
    for part in plans[0].survey:
        assert order(examples, config, 0, ranks, draw_survey=trainer.survey_examples)[
            part
        ].rows == tuple(part.rows)


def test_a_survey_s_micro_batches_stop_growing_where_it_gains_nothing(
    examples: Examples, config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    def sizes(most: int) -> list[int]:
        monkeypatch.setattr(rlhf.data.order, "SURVEY_TOKENS", most)
        course = order(examples, config, draw_survey=Averaging(Section(), None).survey_examples)
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

    plan = order(examples, config, draw_survey=Lengthening(Section(), None).survey_examples).step(0)
    assert [len(part.rows) for part in plan.survey] == [1] * 10


def test_a_survey_sees_the_micro_batch_of_a_loss_that_has_one(
    examples: Examples, config: Config
) -> None:
    config = attrs.evolve(config, batch=BatchConfig(size=10, tokens=200))
    plan = order(examples, config, draw_survey=Averaging(Section(), None).survey_examples).step(0)
    assert (len(plan.survey), len(plan.micro)) == (0, 1)


@pytest.mark.parametrize("kind", [Surveying, Averaging])
def test_the_memory_of_a_step_is_counted_for_the_survey_s_largest_micro_batch(
    examples: Examples, config: Config, kind: type[Numbers]
) -> None:
    course = order(examples, config, draw_survey=kind(Section(), None).survey_examples)
    parts = [part for number in range(12) for part in course.step(number).survey]
    most = max(len(course[part].tokens) for part in parts)
    found = largest(course, 12)
    assert found.survey is not None
    assert len(found.survey.tokens) == most > config.batch.tokens >= len(found.loss.tokens)
    assert largest(order(examples, config), 12).survey is None
