"""A part of the optimizer on the CPU (Twin-Flow): the curve, the share of each part, another share
at a resume, and what the plan says of it."""

import pytest
from attrs import evolve
from plans import SHAPE, config, half, plan

from rlhf.engine import GIB
from rlhf.errors import RLHFError
from rlhf.plugin import ModelConfig, OptimConfig
from rlhf_devkit.plain import PlainBackend
from rlhf_devkit.problem import Case, configure, follow
from rlhf_devkit.ranks import shared
from rlhf_plugin_deepspeed.backend import DeepSpeedBackend
from rlhf_plugin_deepspeed.config import DeepSpeedConfig, check
from rlhf_plugin_deepspeed.memory import estimate
from rlhf_plugin_deepspeed.partial import staying

WHOLE = {"stage": 3, "offload_optimizer": True, "persistence_threshold": 40}


def partly(share, **settings):
    return configure(DeepSpeedConfig(offload_ratio=share, **WHOLE | settings))


def run(case):
    """The outcome, and for each master its elements."""
    backend = DeepSpeedBackend()
    outcome, engine, mesh = follow(backend, case)
    masters = engine.deepspeed.optimizer.fp32_partitioned_groups_flat
    rates = [group["lr"] for group in engine.deepspeed.basic_optimizer.param_groups]
    assert rates == engine.schedule.get_last_lr()
    for master in masters:
        moment = engine.deepspeed.basic_optimizer.state[master]["exp_avg"]
        assert moment.device == master.grad.device == master.device
    backend.close_mesh(mesh)
    return outcome, [master.numel() for master in masters]


@pytest.mark.parametrize("adapter", [False, True], ids=["all weights", "adapter"])
@pytest.mark.parametrize("share", [0.25, 0.6])
def test_parts_follow_the_curve_of_the_whole_under_a_schedule(pair, share, adapter):
    options = {"steps": 6, "micro_batches": 2, "adapter": adapter}
    plain = follow(PlainBackend(), Case(config=configure(), **options | {"micro_batches": 1}))[0]
    assert len(set(plain.rates)) == 6
    whole = pair.run(run, Case(config=partly(1.0), **options))
    found = pair.run(run, Case(config=partly(share), **options))
    for (all_there, groups), (outcome, parts) in zip(whole, found, strict=True):
        assert len(parts) > len(groups)
        assert outcome.losses == pytest.approx(plain.losses, rel=1e-5)
        assert outcome.norms == pytest.approx(plain.norms, rel=1e-5)
        assert outcome.losses == pytest.approx(all_there.losses, rel=1e-5)
        assert outcome.rates == plain.rates


@pytest.mark.parametrize("share", [0.1, 0.5, 0.9, 1.0])
def test_the_share_counts_elements(share):
    sizes = [300, 100, 200, 400, 50, 150]
    places = staying(sizes, share)
    on_cpu = 1 - sum(sizes[place] for place in places) / sum(sizes)
    assert share - 1e-9 <= on_cpu < share + max(sizes) / sum(sizes)
    assert bool(places) == (share < 1)


def test_a_checkpoint_continues_with_another_share(tmp_path):
    straight, *_ = shared(2).run(run, Case(config=partly(0.3), steps=5, save=(2, tmp_path)))[0]
    for share in (0.7, 1.0):
        later, *_ = shared(2).run(run, Case(config=partly(share), steps=5, load=tmp_path))[0]
        assert later.losses == pytest.approx(straight.losses[2:], rel=1e-5)
        assert later.norms == pytest.approx(straight.norms[2:], rel=1e-4)


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        (
            {"preset": "zero2_offload"},
            "deepspeed.offload_ratio works only at ZeRO stage 3, not at stage 2; remove it or set "
            "deepspeed.stage to 3",
        ),
        (
            {},
            "deepspeed.offload_ratio needs deepspeed.offload_optimizer; set both, or remove it",
        ),
        (
            {"offload_optimizer": True, "nvme_path": "/nvme"},
            "deepspeed.offload_ratio cannot be combined with deepspeed.nvme_path; remove one of "
            "the two",
        ),
    ],
    ids=str,
)
def test_what_has_no_part_on_the_cpu_is_refused(settings, text):
    with pytest.raises(RLHFError) as error:
        check(config(offload_ratio=0.5, **settings))
    assert str(error.value) == text


def test_states_in_bf16_have_no_part_on_the_cpu():
    run = half(offload_ratio=0.5, offload_optimizer=True)
    with pytest.raises(RLHFError) as error:
        check(evolve(run, optim=OptimConfig(states="bf16")))
    assert str(error.value) == (
        "optim.states bf16 cannot be combined with deepspeed.offload_optimizer; remove one of the "
        "two"
    )


@pytest.mark.parametrize("share", [0.0, 1.5])
def test_a_share_is_above_0_and_at_most_1(share):
    with pytest.raises(ValueError, match="'offload_ratio' must be"):
        DeepSpeedConfig(offload_ratio=share)


def test_the_plan_and_the_estimate_count_the_part():
    # 7 Gi parameters on 8 ranks: 12 bytes of master and moments for each, where they are, and on
    # the accelerator 4 of the gradient.
    settings = {"offload_optimizer": True}
    made = [
        plan(8, 80 * GIB, stage=3, **settings),
        plan(8, 80 * GIB, offload_ratio=0.25, **settings),
    ]
    assert made[1].summary == (
        "ZeRO 3, bf16, 8 ranks, torch AdamW (fused), 25 % of the optimizer on the CPU"
    )
    zero = made[1].settings["zero_optimization"]
    assert (zero["offload_optimizer"]["ratio"], zero["sub_group_size"]) == (
        0.25,
        7 * GIB // 8 // 32,
    )
    whole, part = (estimate(half(), each, SHAPE, world=8, trained=True) for each in made)
    each_rank = SHAPE.trainable // 8
    assert (part["masters"], part["optimizer"]) == (3 * each_rank, 6 * each_rank)
    assert part["buffers"] - whole["buffers"] == 3 * each_rank
    # At the start 4 bytes of each master, 4 and 2 of its gradient are on the host.
    assert (whole["host"], part["host"]) == (16 * each_rank, 10 * each_rank)
    assert whole["masters"] == whole["optimizer"] == whole["buffers"] == 0


def test_layouts_keep_the_part(pair):
    run = evolve(config(offload_ratio=0.5, offload_optimizer=True), model=ModelConfig(dtype="bf16"))
    assert pair.run(names_of_layouts, run)[0] == [
        "ZeRO 3, 50 % of the optimizer on the CPU",
        "ZeRO 3, parameters and 50 % of the optimizer on the CPU",
    ]


def names_of_layouts(run):
    backend = DeepSpeedBackend()
    mesh = backend.setup_mesh(run)
    names = [layout.name for layout in backend.layouts(run, mesh, SHAPE)]
    backend.close_mesh(mesh)
    return names
