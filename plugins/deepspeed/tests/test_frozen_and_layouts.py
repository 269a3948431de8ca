"""Plans of models that are not trained, and the layouts that a configuration can have."""

import pytest
import torch
import yaml
from attrs import evolve
from plans import SHAPE, config, half

from rlhf.engine import GIB, Mesh
from rlhf.errors import RLHFError
from rlhf.plugin import ModelConfig, OptimConfig
from rlhf_plugin_deepspeed import frozen
from rlhf_plugin_deepspeed.config import check
from rlhf_plugin_deepspeed.layouts import layouts
from rlhf_plugin_deepspeed.memory import estimate


def plan_frozen(world, memory, *, occupied=0, model=None, **settings):
    run = evolve(config(**settings), model=model or ModelConfig(dtype="bf16"))
    mesh = Mesh(world=world, device=torch.device("cpu"), memory=memory)
    return frozen.plan_frozen(run, mesh, SHAPE, occupied=occupied)


# 7 Gi parameters in bf16: 14 GiB whole; 1.75 of 8 shards, and 2.8 of what is gathered ahead.
FROZEN = {
    "whole": (2, 80, 0, "ZeRO 0 (frozen: 14.0 GiB in 60% of 80.0 GiB), bf16, 2 ranks"),
    "whole beside others": (
        8, 80, 30,
        "ZeRO 0 (frozen: 14.0 GiB in 60% of 80.0 GiB, with 30.0 GiB of other models), bf16, "
        "8 ranks",
    ),
    "in shards": (
        8, 80, 40,
        "ZeRO 3 (frozen: 4.5 GiB in 80% of 80.0 GiB, with 40.0 GiB of other models), bf16, "
        "8 ranks",
    ),
    "on the CPU": (
        8, 24, 16,
        "ZeRO 3 (frozen: 2.8 GiB in 80% of 24.0 GiB, with 16.0 GiB of other models), bf16, "
        "8 ranks, parameters on the CPU",
    ),
    "too large": (
        8, 24, 18,
        "ZeRO 3 (frozen: more than 80% of 24.0 GiB, with 18.0 GiB of other models), bf16, "
        "8 ranks, parameters on the CPU",
    ),
    "one rank, which has no shards": (
        1, 20, 0, "ZeRO 0 (frozen: 14.0 GiB in 80% of 20.0 GiB), bf16, 1 rank",
    ),
    "unknown memory": (2, 0, 9, "ZeRO 0 (the device's memory is unknown), bf16, 2 ranks"),
}  # fmt: skip


@pytest.mark.parametrize("name", FROZEN)
def test_a_frozen_model_is_planned_by_its_weights_and_what_is_there(name):
    world, memory, occupied, summary = FROZEN[name]
    assert plan_frozen(world, memory * GIB, occupied=occupied * GIB, stage=2).summary == summary


def test_a_frozen_model_has_no_settings_of_an_optimizer():
    run = evolve(config(preset="zero3_offload", frozen=3), model=ModelConfig(dtype="bf16"))
    mesh = Mesh(world=2, device=torch.device("cpu"), memory=80 * GIB)
    made = frozen.plan_frozen(run, mesh, SHAPE)
    assert not {"offload_optimizer", "offload_param"} & {*made.settings["zero_optimization"]}
    assert made.summary == "ZeRO 3 (as configured), bf16, 2 ranks"


def test_a_frozen_model_with_compiled_layers_stays_whole():
    compiled = ModelConfig(dtype="bf16", kernels="compile")
    made = plan_frozen(8, 16 * GIB, model=compiled)
    assert made.summary.startswith("ZeRO 0 (frozen: more than 80% of 16.0 GiB)")
    with pytest.raises(RLHFError) as error:
        plan_frozen(8, 16 * GIB, model=compiled, frozen=3)
    assert str(error.value) == (
        "deepspeed.frozen 3 cannot be combined with model.kernels compile; set deepspeed.frozen "
        "to 0"
    )
    with pytest.raises(RLHFError) as error:
        plan_frozen(8, 16 * GIB, tensor_parallel=2, frozen=3)
    assert str(error.value) == (
        "deepspeed.frozen 3 cannot be combined with deepspeed.tensor_parallel; set "
        "deepspeed.frozen to 0"
    )


def ways(dtype="bf16", states="fp32", **settings):
    run = evolve(half(dtype, **settings), optim=OptimConfig(states=states))
    mesh = Mesh(world=8, device=torch.device("cuda"), memory=80 * GIB)
    return layouts(run, mesh, SHAPE)


def test_layouts_are_all_stages_and_offloads_the_fastest_first():
    names = [(each.name, each.configured) for each in ways()]
    assert names == [
        ("ZeRO 0", True),
        ("ZeRO 1", True),
        ("ZeRO 2", True),
        ("ZeRO 3", True),
        ("ZeRO 1, optimizer on the CPU", False),
        ("ZeRO 2, optimizer on the CPU", False),
        ("ZeRO 3, optimizer on the CPU", False),
        ("ZeRO 3, optimizer and parameters on the CPU", False),
    ]
    away = [each.name for each in ways(offload_optimizer=True) if each.configured]
    assert away == [f"ZeRO {stage}, optimizer on the CPU" for stage in (1, 2, 3)]
    (only,) = [each for each in ways(preset="zero3_offload") if each.configured]
    assert only.name == "ZeRO 3, optimizer and parameters on the CPU"


def test_layouts_that_conflict_with_other_settings_are_left_out():
    assert [each.name for each in ways(states="bf16")] == [f"ZeRO {stage}" for stage in range(4)]
    assert [each.plan.stage for each in ways(persistence_threshold=0)] == [3, 3, 3]


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"stage": 0},
        {"stage": 3, "offload_param": True},
        {"offload_optimizer": True},
        {"preset": "zero1"},
        {"preset": "zero1_offload"},
        {"preset": "zero3_offload"},
        {"preset": "zero2_fp16", "dtype": "fp16"},
    ],
    ids=str,
)
def test_the_settings_of_a_layout_give_it(settings):
    for each in ways(**settings):
        more, dtype = dict(settings), settings.get("dtype", "bf16")
        for word in filter(None, each.settings.split(" and ")):
            name, _, value = word.partition(" ")
            if name == "model.dtype":
                assert value == dtype
            else:
                more[name.removeprefix("deepspeed.")] = yaml.safe_load(value)
        run = half(**more | {"dtype": dtype})
        check(run)
        (again,) = [other for other in ways(**more | {"dtype": dtype}) if other.configured]
        assert again.name == each.name
        assert again.plan.settings == each.plan.settings
        check(each.config)


def test_what_is_on_the_host_is_counted_there():
    away = {each.name: each for each in ways()}["ZeRO 3, optimizer and parameters on the CPU"]
    parts = estimate(away.config, away.plan, SHAPE, world=8, trained=True)
    assert parts["host"] == (16 + 2) * SHAPE.trainable // 8
    assert parts["optimizer"] == parts["masters"] == 0
