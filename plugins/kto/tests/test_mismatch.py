"""Prompts with the completions of other rows."""

from typing import Any

import attrs
import numpy as np
import pytest
from numpy.typing import NDArray

from rlhf.errors import RLHFError
from rlhf.trainer import Answer, Example
from rlhf_plugin_kto.mismatch import Mismatched, partners


def draw(epoch: int) -> np.random.Generator:
    return np.random.Generator(np.random.PCG64([0, epoch]))


@pytest.mark.parametrize(
    "groups",
    [
        np.arange(2),
        np.arange(23),
        # Pairs that were taken apart, and rows that are taken several times.
        np.repeat(np.arange(7), 2),
        np.array([0, 1, 2, 3, 0, 0, 4, 0]),
        np.array([5, 5, 5, 1, 2, 5, 3, 4]),
    ],
)
def test_no_example_is_paired_with_its_own_row(groups: NDArray[np.int64]) -> None:
    for epoch in range(50):
        partner = partners(groups, draw(epoch))
        assert sorted(partner) == list(range(len(groups)))
        assert (groups[partner] != groups).all()


def test_the_pairing_is_new_in_each_epoch_and_comes_from_the_seed() -> None:
    first, again, second = (partners(np.arange(100), draw(epoch)) for epoch in (0, 0, 1))
    assert (first == again).all()
    assert (first == second).mean() < 0.1


def test_every_other_row_is_a_partner_as_often() -> None:
    counts = np.zeros((4, 4))
    for epoch in range(3000):
        counts[np.arange(4), partners(np.arange(4), draw(epoch))] += 1
    assert counts[~np.eye(4, dtype=bool)] == pytest.approx(1000, abs=120)


@pytest.mark.parametrize(("groups", "largest"), [(np.zeros(1, int), 1), (np.array([0, 0, 1]), 2)])
def test_rows_that_leave_no_partner_are_an_error(groups: NDArray[np.int64], largest: int) -> None:
    with pytest.raises(RLHFError) as error:
        partners(groups, draw(0))
    assert str(error.value) == (
        f"{largest} of {len(groups)} examples come from one row, so they cannot all be paired "
        "with the completion of another row for kto.loss kto; add rows, lower the weight of this "
        "one, or set kto.loss to apo_zero_unpaired"
    )


class Rows(list[Example]):
    """Rows of n tokens after a prompt of two, with what `Examples` knows of them."""

    def __init__(self, *sizes: int) -> None:
        super().__init__(Example([n, n], [Answer([n] * size)]) for n, size in enumerate(sizes))
        self.sources = np.arange(len(sizes))
        self.prompt_lengths = np.full(len(sizes), 2)
        self.longest_path = 2 + np.array(sizes)
        self.value_kinds: dict[str, str] = {}
        self.with_inputs = np.zeros(len(sizes), bool)


def test_an_answer_is_cut_where_the_data_ends() -> None:
    rows: Any = Rows(1, 5, 9, 3)
    rows[1] = Example([1] * 6, rows[1].answers)
    rows.prompt_lengths[1], rows.longest_path[1] = 6, 11
    for epoch in range(20):
        mismatched = Mismatched(rows, draw(epoch))
        for number, example in enumerate(mismatched):
            (answer,) = example.answers
            assert list(example.prompt) == list(rows[number].prompt)
            assert number not in answer.tokens
            size = len(example.prompt) + len(answer.tokens)
            assert size == mismatched.lengths[number] <= 11


def test_a_mismatched_example_has_its_rows_values_and_none_of_the_rows_answer() -> None:
    rows: Any = Rows(3, 2, 4)
    rows.value_kinds = {"weight": "example", "rank": "answer", "score": "token"}
    for number, (own, size) in enumerate(zip(list(rows), (3, 2, 4), strict=True)):
        values = {"weight": float(number), "rank": [1.0], "score": [[0.5] * size]}
        rows[number] = attrs.evolve(own, values=values)
    mismatched = Mismatched(rows, draw(0))
    assert mismatched.value_kinds == {"weight": "example"}
    assert [example.values for example in mismatched] == [{"weight": float(n)} for n in range(3)]


def test_a_mismatched_example_has_the_images_of_its_prompt() -> None:
    rows: Any = Rows(3, 2)
    inputs = {"pixel_values": np.ones((1, 4)), "token_type_ids": np.array([1, 0, 0, 0, 0])}
    rows[0] = attrs.evolve(rows[0], inputs=inputs)
    example, _ = Mismatched(rows, draw(0))
    assert example.inputs["pixel_values"].shape == (1, 4)
    assert example.inputs["token_type_ids"].tolist() == [1, 0, 0, 0]
