"""The second copy of the weights (hpZ of ZeRO++): the same curve, exact resumes, what it holds and
what the plan says of it."""

import pytest
import torch
from attrs import evolve
from deepspeed.utils import groups
from plans import SHAPE, config, half, plan

from rlhf.engine import GIB, Mesh
from rlhf.errors import RLHFError
from rlhf.plugin import ModelConfig
from rlhf_devkit.plain import PlainBackend
from rlhf_devkit.problem import (
    Case,
    configure,
    follow,
    load,
    losses,
    make_batch,
    move_states,
    whole_weights,
)
from rlhf_devkit.ranks import shared
from rlhf_plugin_deepspeed.backend import DeepSpeedBackend
from rlhf_plugin_deepspeed.config import DeepSpeedConfig, check
from rlhf_plugin_deepspeed.frozen import plan_frozen
from rlhf_plugin_deepspeed.memory import estimate, states
from rlhf_plugin_deepspeed.mesh import axis_sizes
from rlhf_plugin_deepspeed.weights import BackendSharding

SETTINGS = {
    "stage": 3,
    "frozen": 3,
    "persistence_threshold": 0,
    # Weights of a small model would otherwise stay whole from forward to backward.
    "config": {
        "zero_optimization": {"stage3_max_reuse_distance": 0, "stage3_prefetch_bucket_size": 0}
    },
}


def copies(module):
    """Whole sizes, and the sizes of this rank's second copies, None where there is none."""
    second = [item.ds_secondary_tensor for item in module.parameters()]
    sizes = [None if item is None else item.numel() for item in second]
    return sizes, [item.ds_numel for item in module.parameters()]


def run(case):
    """The outcome, the final weights, the reference's losses and the second copies of both models
    while they compute."""
    backend = DeepSpeedBackend()
    outcome, engine, mesh = follow(backend, case)
    plan, module = load(backend, case, mesh, "reference", trained=False)
    reference = backend.prepare(
        model=module, optimizer=None, schedule=None, role="reference", plan=plan, mesh=mesh
    )
    batch = make_batch(0, range(8), mesh.device)
    seen = [copies(each.module) for each in (engine, reference)]
    for each in (reference, engine):
        loss = each(batch, losses)["loss"].sum()
    seen.append(copies(engine.module))
    # What leaves the device, and what is released with the model.
    assert all(len(BackendSharding().shards(item)) == 2 for item in module.parameters())
    move_states(backend, reference)
    with torch.no_grad():
        frozen = float(reference(batch, losses)["loss"].sum()) / 8
    del loss
    weights = whole_weights(DeepSpeedBackend(), engine)
    backend.close_mesh(mesh)
    assert groups._get_zero_param_intra_parallel_group() is None
    return outcome, weights, frozen, seen


@pytest.mark.parametrize(
    ("adapter", "ranks", "second"),
    [
        (False, 4, 2),
        (True, 2, 2),
        *(
            pytest.param(*each, marks=pytest.mark.matrix)
            for each in ((False, 2, 2), (False, 4, 4), (True, 4, 2), (True, 4, 4))
        ),
    ],
)
def test_the_curve_is_that_of_one_rank_and_resumes_are_exact(tmp_path, ranks, second, adapter):
    plain = follow(PlainBackend(), Case(config=configure(), adapter=adapter))[0]
    section = DeepSpeedConfig(hpz_partition_size=second, **SETTINGS)
    options = {"config": configure(section), "adapter": adapter, "micro_batches": 2}
    found = shared(ranks).run(run, Case(**options, save=(2, tmp_path)))
    again = shared(ranks).run(run, Case(**options, load=tmp_path))
    for (outcome, weights, frozen, seen), (later, weights_later, *_) in zip(
        found, again, strict=True
    ):
        assert outcome.losses == pytest.approx(plain.losses, rel=1e-5)
        assert outcome.norms == pytest.approx(plain.norms, rel=1e-5)
        assert later.losses == outcome.losses[2:]
        assert later.norms == outcome.norms[2:]
        assert all(torch.equal(weights[name], weights_later[name]) for name in weights)
        # The loss of the first step, whose weights the reference has.
        assert frozen == pytest.approx(plain.losses[0], rel=1e-5)
        (updated, _), *computing = seen
        # An update ends the copy of what is trained.
        assert adapter or updated == [None] * len(updated)
        for sizes, whole in computing:
            assert sizes == [-(-size // ranks) * ranks // second for size in whole]


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        (
            {"stage": 2},
            "deepspeed.hpz_partition_size works only at ZeRO stage 3, not at stage 2; remove it or "
            "set deepspeed.stage to 3",
        ),
        (
            {"preset": "zero3_offload"},
            "deepspeed.hpz_partition_size cannot be combined with deepspeed.offload_param; remove "
            "one of the two",
        ),
        (
            {"tensor_parallel": 2},
            "deepspeed.hpz_partition_size cannot be combined with deepspeed.tensor_parallel; "
            "remove one of the two",
        ),
    ],
    ids=str,
)
def test_what_has_no_second_copy_is_refused(settings, text):
    with pytest.raises(RLHFError) as error:
        check(config(hpz_partition_size=2, **settings))
    assert str(error.value) == text


def test_it_chooses_stage_3_at_which_layers_are_not_compiled():
    with pytest.raises(RLHFError) as error:
        check(evolve(half(hpz_partition_size=2), model=ModelConfig(kernels="compile")))
    assert str(error.value) == (
        "model.kernels compile works only at ZeRO stages 0 to 2, not at stage 3; use the preset "
        "zero2"
    )


def test_its_size_divides_the_ranks():
    with pytest.raises(RLHFError) as error:
        axis_sizes(half(hpz_partition_size=3), 4)
    assert str(error.value) == (
        "deepspeed.hpz_partition_size is 3, which does not divide the number of ranks, 4; set it "
        "to 1 or 2 or 4"
    )


def test_the_plan_and_the_estimate_count_it():
    # 7 Gi parameters in bf16: 14 GiB, of which 4 of 16 ranks have a fourth once more.
    settings = {"hpz_partition_size": 4}
    once, twice = plan(16, 80 * GIB, stage=3), plan(16, 80 * GIB, **settings)
    assert twice.summary == (
        "ZeRO 3, bf16, 16 ranks, a second copy of the weights over 4 ranks, torch AdamW (fused)"
    )
    sharded, two_layers = twice.settings["zero_optimization"], 2 * SHAPE.largest_layer
    needed = states(half(), SHAPE, sharded, world=16, gathered=two_layers)
    assert sum(needed.values()) / GIB == 11.5
    parts = [estimate(half(), made, SHAPE, world=16, trained=True) for made in (once, twice)]
    assert parts[1]["weights"] - parts[0]["weights"] == 14 * GIB // 4
    run = evolve(config(frozen=3, **settings), model=ModelConfig(dtype="bf16"))
    mesh = Mesh(world=16, device=torch.device("cpu"), memory=80 * GIB)
    assert plan_frozen(run, mesh, SHAPE).summary == (
        "ZeRO 3 (as configured), bf16, 16 ranks, a second copy of the weights over 4 ranks"
    )
