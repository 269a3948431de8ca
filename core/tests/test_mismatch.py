"""Prompts with the completions of other rows."""

import numpy as np
import pytest
from numpy.typing import NDArray

from rlhf.data.mismatch import partners
from rlhf.errors import RLHFError


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
        "with the completion of another row; add rows or lower the weight of this one"
    )
