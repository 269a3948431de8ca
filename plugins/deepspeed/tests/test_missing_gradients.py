"""Gradients that some micro-batches or ranks lack, at every stage: real DeepSpeed on two ranks."""

from types import SimpleNamespace

import pytest
import torch
from uneven import HEADS, Changed, case_of, norms_of, step, without_head

from rlhf_devkit.problem import make_batch, start
from rlhf_devkit.ranks import RankFailure
from rlhf_plugin_deepspeed.backend import DeepSpeedBackend
from rlhf_plugin_deepspeed.patches import stages_1_and_2
from rlhf_plugin_deepspeed.versions import installed_version, older

ON_ANY_RANK = [
    {"stage": stage, "offload_optimizer": offload} for stage in (1, 2) for offload in (False, True)
]
ALIKE = ["in the first micro-batch", "in the last micro-batch", "nowhere"]
SHARDED = [{"stage": 3}, {"stage": 3, "persistence_threshold": 0}, {"preset": "zero3_offload"}]


@pytest.mark.parametrize(
    "heads",
    [
        "in the first micro-batch",
        pytest.param("in the last micro-batch", marks=pytest.mark.matrix),
        pytest.param("on one rank", marks=pytest.mark.matrix),
        "on the other, later",
        pytest.param("nowhere", marks=pytest.mark.matrix),
    ],
)
def test_a_gradient_counts_on_any_rank(pair, heads):
    expected, _ = pair.run(norms_of, {"stage": 0}, HEADS[heads])
    for settings in [*ON_ANY_RANK, *(SHARDED if heads in ALIKE else [])]:
        for found in pair.run(norms_of, settings, HEADS[heads]):
            assert found == pytest.approx(expected, rel=1e-5)


@pytest.mark.matrix
@pytest.mark.parametrize("heads", ALIKE)
def test_a_gradient_counts_in_any_micro_batch(single, heads):
    (expected,) = single.run(norms_of, {"stage": 0}, HEADS[heads])
    for settings in (*ON_ANY_RANK, *SHARDED):
        (found,) = single.run(norms_of, settings, HEADS[heads])
        assert found == pytest.approx(expected, rel=1e-5)


APART = {"zero_optimization": {"contiguous_gradients": False}}


def step_under(changes, settings, dtype="fp32"):
    """Norms of a step whose head has a gradient in the first micro-batch and of the one after it,
    and whether reductions are ours."""
    backend = Changed(changes)
    case = case_of(settings, dtype=dtype, tied=False)
    mesh, engine, _ = start(backend, case)
    norms = [step(mesh, engine, HEADS["in the first micro-batch"][mesh.rank]) for _ in range(2)]
    ours = engine.order is not None
    backend.close_mesh(mesh)
    return norms, ours


@pytest.mark.parametrize(
    ("changes", "settings", "dtype"),
    [
        ({"zero_optimization": {"overlap_comm": False}}, {"stage": 1}, "fp32"),
        ({"data_types": {"grad_accum_dtype": "fp32"}}, {"stage": 2}, "bf16"),
        (APART, {"stage": 1}, "fp32"),
        (APART, {"stage": 2}, "fp32"),
    ],
    ids=str,
)
def test_other_layouts_are_left_to_deepspeed(pair, changes, settings, dtype):
    if changes is APART and older(installed_version(), "0.19.8"):
        with pytest.raises(RankFailure, match="sums gradients incorrectly"):
            pair.run(step_under, changes, settings, dtype)
        return
    (expected, ours), _ = pair.run(step_under, {}, {"stage": 1}, dtype)
    assert ours
    for found, ours in pair.run(step_under, changes, settings, dtype):
        assert not ours
        assert found == pytest.approx(expected, rel=1e-5 if dtype == "fp32" else 1e-2)


def made(settings):
    """Zeros made where the head, which is first in the order, has no gradient."""
    backend, counted = DeepSpeedBackend(), []
    mesh, engine, _ = start(backend, case_of(settings, tied=False))
    loss = engine(make_batch(0, [mesh.rank], engine.device), without_head)["loss"].sum()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stages_1_and_2, "torch", SimpleNamespace(**vars(torch)))
        patch.setattr(
            stages_1_and_2.torch,
            "zeros_like",
            lambda tensor: (counted.append(tuple(tensor.shape)), torch.zeros_like(tensor))[1],
        )
        engine.backward(loss, last=True)
    backend.close_mesh(mesh)
    return counted


def test_zeros_are_made_only_for_missing_gradients(pair):
    assert pair.run(made, {"stage": 2, "bucket_size": 400}) == [[(32, 16)]] * 2
