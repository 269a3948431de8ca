"""Steps and layouts: every row once, never over the budget, alike over ranks, the same on any
hardware."""

import numpy as np
import pytest

from rlhf.data.layout import costs, layout, steps
from rlhf.errors import RLHFError


def test_an_epoch_takes_every_row_once_and_the_last_step_the_remainder() -> None:
    chosen = steps(103, 10, seed=3, epoch=0)
    assert [len(rows) for rows in chosen] == [10] * 10 + [3]
    assert sorted(np.concatenate(chosen)) == list(range(103))


def test_the_order_depends_only_on_seed_and_epoch() -> None:
    def order(seed: int, epoch: int) -> list[int]:
        return list(np.concatenate(steps(50, 7, seed, epoch)))

    assert order(0, 0) == order(0, 0)
    assert len({tuple(order(seed, epoch)) for seed in (0, 1) for epoch in (0, 1)}) == 4
    assert list(np.concatenate(steps(50, 7, 0, 0, shuffle=False))) == list(range(50))
    whole = np.concatenate(steps(50, 50, 0, 0))
    assert list(np.concatenate(steps(50, 7, 0, 0))) == list(whole)


@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
def test_a_layout_takes_every_row_once_within_the_budget(ranks: int) -> None:
    draw = np.random.default_rng(ranks)
    for _ in range(200):
        tokens = int(draw.integers(50, 400))
        lengths = draw.integers(1, tokens + 1, int(draw.integers(1, 60)))
        laid = layout(lengths, ranks, tokens, costs(lengths, lengths))
        assert all(len(micro) == ranks for micro in laid)
        cells = [cell for micro in laid for cell in micro]
        assert all(lengths[cell].sum() <= tokens for cell in cells)
        assert sorted(np.concatenate(cells)) == list(range(len(lengths)))
        # First fit decreasing needs at most 11/9 of the fewest bins, and 6/9 of a bin.
        fewest = -(-int(lengths.sum()) // tokens)
        assert len(laid) * ranks <= max(ranks, 1.7 * fewest + ranks)


def test_the_full_bins_that_balancing_misses_are_reached() -> None:
    lengths = [6, 6, 4, 4, 5, 5]
    laid = layout(lengths, 1, 10)
    assert len(laid) == 3


def test_ranks_do_about_the_same_work_at_the_same_time() -> None:
    draw = np.random.default_rng(0)
    lengths = np.minimum(draw.lognormal(5.5, 0.8, 128).astype(np.int64) + 8, 4096)
    work = costs(lengths, lengths)
    laid = layout(lengths, 4, 8192, work)
    for micro in laid:
        loads = [work[cell].sum() for cell in micro]
        assert max(loads) < 1.1 * np.mean(loads)


def test_long_paths_count_for_more_than_their_tokens() -> None:
    lengths = np.array([8192, 4096, 4096, 4096, 4096])
    work = costs(lengths, lengths)
    assert work[0] > 2 * work[1]


def test_a_rank_without_rows_gets_an_empty_array() -> None:
    laid = layout([5], 3, 10)
    assert [len(cell) for cell in laid[0]] == [1, 0, 0]
    assert laid[0][1].dtype == np.int64
    assert [len(cell) for micro in layout([], 2, 10) for cell in micro] == [0, 0]


def test_layouts_are_the_same_every_time() -> None:
    lengths = np.random.default_rng(1).integers(1, 100, 64)
    first, second = layout(lengths, 4, 300), layout(lengths, 4, 300)
    for one, two in zip(first, second, strict=True):
        for a, b in zip(one, two, strict=True):
            assert list(a) == list(b)


def test_an_example_over_the_budget_names_the_least_sufficient_one() -> None:
    with pytest.raises(RLHFError) as caught:
        layout([5, 17, 3], 2, 16)
    assert str(caught.value) == (
        "an example has 17 tokens, more than batch.tokens 16; set batch.tokens to at least 17"
    )
