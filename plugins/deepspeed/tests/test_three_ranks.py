"""Gradients over three ranks, whose shards have padding. In one file, so that one process of tests
starts three ranks."""

import pytest
from uneven import norms_of, train, without_head

from rlhf_devkit.problem import losses


def test_shards_with_padding_count_too(three):
    heads = [(without_head, losses)] * 3
    expected, *_ = three.run(norms_of, {"stage": 0}, heads)
    for found in three.run(norms_of, {"preset": "zero3_offload"}, heads):
        assert found == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize(
    ("settings", "more"),
    [
        ({"stage": 1, "bucket_size": 400}, {}),
        pytest.param(
            {"stage": 2, "bucket_size": 1100}, {"micro_batches": 2}, marks=pytest.mark.matrix
        ),
        ({"stage": 2, "bucket_size": 40}, {"adapter": True, "micro_batches": 2}),
        pytest.param(
            {"preset": "zero1_offload", "bucket_size": 400},
            {"micro_batches": 2},
            marks=pytest.mark.matrix,
        ),
        pytest.param(
            {"preset": "zero2_offload", "bucket_size": 400},
            {"adapter": True, "micro_batches": 2},
            marks=pytest.mark.matrix,
        ),
    ],
    ids=str,
)
def test_over_one_rank_and_three_the_curve_is_the_same(three, single, settings, more):
    (whole,) = single.run(train, {"stage": 0}, more)
    for outcome in (*three.run(train, settings, more), *single.run(train, settings, more)):
        assert outcome.norms == pytest.approx(whole.norms, rel=1e-4)
        assert outcome.losses == pytest.approx(whole.losses, rel=1e-4)
