"""The section `deepspeed:` without DeepSpeed: presets, refusals word for word, the table, the
stage."""

import re
import subprocess
import sys

import pytest
import torch
import yaml
from attrs import evolve

from rlhf.engine import GIB, Mesh, ModelShape
from rlhf.errors import RLHFError
from rlhf.plugin import ModelConfig, OptimConfig
from rlhf.testing.problem import configure
from rlhf_plugin_deepspeed import capabilities, frozen, zero
from rlhf_plugin_deepspeed.config import DeepSpeedConfig, Resolved, check, resolve
from rlhf_plugin_deepspeed.layouts import layouts
from rlhf_plugin_deepspeed.memory import estimate


def config(**settings):
    run = configure()
    section = DeepSpeedConfig(**settings)
    object.__setattr__(run, "section", section)
    return run


REFUSED = [
    (
        {"preset": "zero2", "stage": 3},
        "deepspeed.stage is 3 but the preset zero2 is stage 2; set only one of the two",
    ),
    (
        {"preset": "zero2_offload", "offload_optimizer": False},
        "deepspeed.offload_optimizer is false but the preset zero2_offload turns it on; use the "
        "preset zero2",
    ),
    (
        {"preset": "zero3_cpuoffload", "offload_param": False},
        "deepspeed.offload_param is false but the preset zero3_cpuoffload turns it on; use the "
        "preset zero3",
    ),
    (
        {"stage": 0, "offload_optimizer": True},
        "deepspeed.offload_optimizer has no effect at ZeRO stage 0, only at stages 1 to 3; "
        "remove it or use the preset zero1_offload",
    ),
    (
        {"preset": "zero2", "offload_param": True},
        "deepspeed.offload_param has no effect at ZeRO stage 2, only at stage 3; remove it or "
        "use the preset zero3_offload",
    ),
    (
        {"stage": 1, "persistence_threshold": 0},
        "deepspeed.persistence_threshold has no effect at ZeRO stage 1, only at stage 3; remove "
        "it or set deepspeed.stage to 3",
    ),
    (
        {"persistence_threshold": 0},
        "deepspeed.persistence_threshold has no effect at ZeRO stage auto, only at stage 3; "
        "remove it or set deepspeed.stage to 3",
    ),
    (
        {"preset": "ddp", "bucket_size": 1000},
        "deepspeed.bucket_size has no effect at ZeRO stage 0, only at stages 1 to 3; remove it "
        "or use the preset zero1",
    ),
]


@pytest.mark.parametrize(("settings", "text"), REFUSED, ids=lambda value: str(value)[:40])
def test_settings_without_effect_are_refused(settings, text):
    with pytest.raises(RLHFError) as error:
        check(config(**settings))
    assert str(error.value) == text


def test_a_quantized_base_is_refused_at_stage_3():
    run = evolve(config(stage=3), model=ModelConfig(quantize="nf4"))
    with pytest.raises(RLHFError) as error:
        check(run)
    assert str(error.value) == (
        "model.quantize has no effect at ZeRO stage 3, only at stages 0 to 2; use the preset "
        "zero2, which shards what the adapter trains"
    )


def test_presets_fill_unset_settings():
    assert resolve(DeepSpeedConfig()) == Resolved(
        stage="auto", offload_optimizer=False, offload_param=False
    )
    assert resolve(DeepSpeedConfig(preset="zero1", offload_optimizer=True)) == Resolved(
        stage=1, offload_optimizer=True, offload_param=False
    )
    assert resolve(DeepSpeedConfig(preset="zero3_cpuoffload", stage=3)) == Resolved(
        stage=3, offload_optimizer=True, offload_param=True
    )
    assert resolve(DeepSpeedConfig(offload_param=True)).stage == 3


def test_a_deepspeed_out_of_range_is_refused_by_number_not_by_text():
    with pytest.raises(RLHFError) as error:
        capabilities.check_version("0.18.9")
    assert str(error.value) == (
        "deepspeed 0.18.9 is too old: before 0.19.0 it loses gradients at stage 2 with the "
        "optimizer on the CPU; run pip install 'deepspeed>=0.19,<0.20'"
    )
    with pytest.raises(RLHFError) as error:
        capabilities.check_version("0.20.0")
    assert str(error.value) == (
        "deepspeed 0.20.0 is too new: this backend patches internals of deepspeed 0.19; run pip "
        "install 'deepspeed>=0.19,<0.20'"
    )
    with pytest.raises(RLHFError) as error:
        capabilities.check_version("0.17.5")
    assert str(error.value) == (
        "deepspeed 0.17.5 is too old: before 0.17.6 it offloads an engine's states only at stage "
        "3, before 0.19.0 it loses gradients at stage 2 with the optimizer on the CPU; run pip "
        "install 'deepspeed>=0.19,<0.20'"
    )
    with pytest.raises(
        RLHFError,
        match=re.escape(
            "deepspeed 0.16.3 is too old: before 0.16.4 it cannot train with tensor parallelism, "
        ),
    ):
        capabilities.check_version("0.16.3")
    for version in ("0.19.0", "0.19.10", "0.19.1+cu130"):
        capabilities.check_version(version)
    for version in ("0.9.99", "0.100.0", "1.0", "0.20.0rc1"):
        with pytest.raises(RLHFError):
            capabilities.check_version(version)


def test_the_record_imports_neither_torch_nor_deepspeed():
    code = (
        "import sys; from rlhf_plugin_deepspeed import plugin; import "
        "rlhf_plugin_deepspeed.config as c; c.installed_version(); print([m for m in ('torch', "
        "'deepspeed', 'transformers', 'numpy') if m in sys.modules])"
    )
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert shown.stdout == "[]\n"


SHAPE = ModelShape(
    parameters=7 * GIB,
    trainable=7 * GIB,
    largest_layer=GIB // 4,
    hidden=4096,
    layers=32,
    head=32000 * 4096,
)


def half(dtype="bf16", **settings):
    return evolve(config(**settings), model=ModelConfig(dtype=dtype))


def plan(world, memory, *, dtype="bf16", shape=SHAPE, **settings):
    run = half(dtype, **settings)
    mesh = Mesh(world=world, device=torch.device("cpu"), memory=memory)
    return zero.plan(run, mesh, shape, optimizer="FusedAdam", reason="")


def test_auto_takes_the_first_stage_whose_states_fit():
    # 7 Gi parameters in bf16: 14 GiB of weights, 14 of gradients, 84 of optimizer states.
    assert plan(8, 200 * GIB).stage == 0
    assert plan(8, 80 * GIB).stage == 1
    assert plan(8, 48 * GIB).stage == 2
    assert plan(8, 32 * GIB).stage == 3


@pytest.mark.parametrize("settings", [{"kernels": "compile"}, {"fp8": "tensorwise"}])
def test_auto_takes_no_stage_at_which_layers_are_not_compiled(settings):
    run = evolve(config(), model=ModelConfig(dtype="bf16", **settings))
    mesh = Mesh(world=8, device=torch.device("cpu"), memory=32 * GIB)
    made = zero.plan(run, mesh, SHAPE, optimizer="FusedAdam", reason="")
    assert made.stage == 2


def test_the_summary_states_the_reason():
    assert plan(8, 80 * GIB).summary == (
        "ZeRO 1 (the first whose states fit: 38.50 GiB in 60% of 80.0 GiB), bf16, 8 ranks, "
        "FusedAdam"
    )
    assert plan(1, 80 * GIB).summary == (
        "ZeRO 0 (no stage fits: 112.0 GiB of states, 60% of 80.0 GiB; offload or add ranks), "
        "bf16, 1 rank, FusedAdam"
    )
    assert plan(2, 80 * GIB, preset="zero2_offload").summary == (
        "ZeRO 2, bf16, 2 ranks, FusedAdam, optimizer on the CPU"
    )


@pytest.mark.parametrize("mode", ["auto", "always", "never"])
def test_states_stay_where_they_are_if_the_optimizer_is_on_the_cpu(mode):
    assert plan(2, 80 * GIB, stage=2, offload_states=mode).offload_states == mode
    offloaded = plan(2, 80 * GIB, preset="zero2_offload", offload_states=mode)
    assert offloaded.offload_states == "never"
    assert offloaded.summary.endswith(
        "FusedAdam, optimizer on the CPU"
        + ", so that offload_states is skipped" * (mode == "always")
    )


def test_auto_with_the_optimizer_on_the_cpu_starts_at_stage_1():
    assert plan(1, 140 * GIB, offload_optimizer=True).stage == 1


def test_at_stage_3_gradients_wait_where_the_optimizer_is():
    there, away = (
        estimate(half(), plan(8, 80 * GIB, **settings), SHAPE, world=8, trained=True)
        for settings in ({"stage": 3}, {"stage": 3, "offload_optimizer": True})
    )
    assert (there["buffers"], away["buffers"]) == (2 * SHAPE.trainable // 8, 0)
    # In backward whole ones fill a bucket while another is reduced.
    assert there["reducing"] == away["reducing"] == 2 * 2 * 200_000_000


@pytest.mark.parametrize(("stage", "master"), [(1, 0), (2, 0), (3, 2)])
def test_states_in_bf16_need_masters_only_at_stage_3(stage, master):
    run = evolve(half(), optim=OptimConfig(states="bf16"))
    parts = estimate(run, plan(8, 80 * GIB, stage=stage), SHAPE, world=8, trained=True)
    assert parts["optimizer"] == 4 * SHAPE.trainable // 8
    assert parts["masters"] == master * SHAPE.trainable // 8


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_sums_that_an_early_deepspeed_gets_wrong_are_refused(stage):
    def check(version, **zero):
        capabilities.check_sums({"zero_optimization": zero}, stage=stage, version=version)

    check("0.19.0")
    check("0.19.8", contiguous_gradients=False)
    if stage == 3:
        check("0.19.0", contiguous_gradients=False)
        return
    with pytest.raises(RLHFError) as error:
        check("0.19.0", contiguous_gradients=False)
    assert str(error.value) == (
        "zero_optimization.contiguous_gradients is false, with which deepspeed 0.19.0 adds up "
        f"gradients wrongly at stage {stage}; leave it true or run pip install "
        "'deepspeed>=0.19.8,<0.20'"
    )


def test_one_bucket_is_filled_while_another_is_reduced_over_several_ranks():
    alone, together = (
        estimate(half(), plan(world, 80 * GIB, stage=2), SHAPE, world=world, trained=True)
        for world in (1, 2)
    )
    assert alone["buffers"] == 2 * 200_000_000
    assert together["buffers"] == 2 * alone["buffers"]


@pytest.mark.parametrize(
    ("billions", "layers", "elements"),
    [(0.5, 24, 50_000_000), (1.6, 16, 91_808_000), (7.0, 32, 200_000_000)],
)
def test_a_bucket_reduced_beside_backward_has_the_size_of_a_layer_within_bounds(
    billions, layers, elements
):
    size = int(billions * 10**9)
    shape = evolve(
        SHAPE, parameters=size + SHAPE.head, trainable=size, layers=layers, lookup=SHAPE.head
    )
    zero = plan(2, 800 * GIB, shape=shape, stage=2).settings["zero_optimization"]
    assert zero["reduce_bucket_size"] == elements
    assert zero["allgather_bucket_size"] == 200_000_000


@pytest.mark.parametrize(("stage", "share"), [(1, 0), (2, 8)])
def test_gradients_of_a_micro_batch_come_beside_the_sums_of_earlier_ones(stage, share):
    parts = estimate(half(), plan(8, 800 * GIB, stage=stage), SHAPE, world=8, trained=True)
    assert parts.get("reducing", 0) == (2 * SHAPE.trainable // share if share else 0)
    away = plan(8, 800 * GIB, stage=stage, offload_optimizer=True)
    assert "reducing" not in estimate(half(), away, SHAPE, world=8, trained=True)


@pytest.mark.parametrize(("stage", "gradients"), [(1, 2 * SHAPE.trainable), (2, 0)])
def test_with_the_optimizer_on_the_host_gradients_of_stage_2_are_added_up_there(stage, gradients):
    # Measured at 0.5B, four full micro-batches: 7.6 GiB at stage 1 and 6.3 at stage 2.
    away = plan(1, 800 * GIB, stage=stage, offload_optimizer=True)
    parts = estimate(half(), away, SHAPE, world=1, trained=True)
    assert parts.get("gradients", 0) == gradients
    assert parts["optimizer"] == parts["updating"] == 0
    bucket = away.settings["zero_optimization"]["reduce_bucket_size"]
    assert parts["buffers"] == 2 * (bucket + SHAPE.largest_layer)


def test_buckets_are_even_as_deepspeed_demands():
    odd = evolve(SHAPE, trainable=12_345)
    for given in (plan(1, GIB, shape=odd, stage=2), plan(1, GIB, stage=2, bucket_size=12_345)):
        assert given.settings["zero_optimization"]["allgather_bucket_size"] == 12_346


def test_every_setting_that_deepspeed_would_choose_is_set():
    settings = plan(2, 80 * GIB, stage=3, persistence_threshold=0).settings
    assert settings["gradient_clipping"] == 0.5
    assert settings["timers"] == {"throughput": {"enabled": False}}
    assert settings["fp16"]["auto_cast"] is False
    assert settings["bf16"] == {"enabled": True, "check_grad_overflow": True}
    assert settings["zero_optimization"] == {
        "stage": 3,
        "reduce_bucket_size": 200_000_000,
        "allgather_bucket_size": 200_000_000,
        "stage3_prefetch_bucket_size": 50_000_000,
        "stage3_param_persistence_threshold": 0,
        "memory_efficient_linear": False,
    }


def plan_frozen(world, memory, *, occupied=0, model=None, **settings):
    run = evolve(config(**settings), model=model or ModelConfig(dtype="bf16"))
    mesh = Mesh(world=world, device=torch.device("cpu"), memory=memory)
    return frozen.plan_frozen(run, mesh, SHAPE, role="teacher", occupied=occupied)


# 7 Gi parameters in bf16: 14 GiB whole; 1.75 of 8 shards, and 2.8 of what is gathered ahead.
FROZEN = {
    "whole": (2, 80, 0, "ZeRO 0 (frozen: 14.0 GiB in 60% of 80.0 GiB), bf16, 2 ranks"),
    "whole beside others": (
        8, 80, 30,
        "ZeRO 0 (frozen: 14.0 GiB in 60% of 80.0 GiB, beside 30.0 GiB of other models), bf16, "
        "8 ranks",
    ),
    "in shards": (
        8, 80, 40,
        "ZeRO 3 (frozen: 4.5 GiB in 80% of 80.0 GiB, beside 40.0 GiB of other models), bf16, "
        "8 ranks",
    ),
    "on the CPU": (
        8, 24, 16,
        "ZeRO 3 (frozen: 2.8 GiB in 80% of 24.0 GiB, beside 16.0 GiB of other models), bf16, "
        "8 ranks, parameters on the CPU",
    ),
    "too large": (
        8, 24, 18,
        "ZeRO 3 (frozen: more than 80% of 24.0 GiB, beside 18.0 GiB of other models), bf16, "
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
    made = frozen.plan_frozen(run, mesh, SHAPE, role="reference")
    assert not {"offload_optimizer", "offload_param"} & {*made.settings["zero_optimization"]}
    assert made.summary == "ZeRO 3 (as configured), bf16, 2 ranks"


def test_ways_of_a_frozen_model_that_take_less_memory_are_named():
    assert plan_frozen(8, 80 * GIB).lighter == (
        "deepspeed.frozen 3 (4.5 GiB of weights of the teacher instead of 14.0)",
        "deepspeed.frozen offload (2.8 GiB of weights of the teacher instead of 14.0)",
    )


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


def test_models_that_are_loaded_leave_less_room_for_the_next():
    run = evolve(config(), model=ModelConfig(dtype="bf16"))
    mesh = Mesh(world=8, device=torch.device("cpu"), memory=80 * GIB)
    made = zero.plan(run, mesh, SHAPE, optimizer="FusedAdam", reason="", occupied=16 * GIB)
    assert made.summary == (
        "ZeRO 2 (the first whose states fit: 26.25 GiB in 60% of 80.0 GiB less 16.0 GiB of other "
        "models), bf16, 8 ranks, FusedAdam"
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


def test_parameters_on_the_host_are_not_states_of_the_accelerator():
    run = config(preset="zero3_offload")
    resolved = resolve(run.backend_section)
    mesh = Mesh(world=2, device=torch.device("cpu"), memory=80 * GIB)
    assert zero._needed(run, resolved, SHAPE, mesh, 3) < SHAPE.trainable * 2


def test_states_in_bf16_are_deepspeeds_own_settings():
    mesh = Mesh(world=1, device=torch.device("cpu"), memory=80 * GIB)
    run = evolve(
        config(stage=1), model=ModelConfig(dtype="bf16"), optim=OptimConfig(states="bf16", clip=0.5)
    )
    made = zero.plan(run, mesh, SHAPE, optimizer="AdamW", reason="")
    assert made.settings["bf16"]["bf16_optimizer_states"] is True
    assert made.settings["zero_allow_untested_optimizer"] is True


def test_without_a_known_memory_the_first_stage_is_taken():
    assert plan(4, 0).summary == (
        "ZeRO 0 (the device's memory is unknown), bf16, 4 ranks, FusedAdam"
    )


def test_a_base_in_four_bits_is_counted_so():
    adapters = evolve(SHAPE, trainable=GIB // 100)
    mesh = Mesh(world=1, device=torch.device("cpu"), memory=24 * GIB)
    run = evolve(config(), model=ModelConfig(dtype="bf16", quantize="nf4"))
    assert zero.plan(run, mesh, adapters, optimizer="FusedAdam", reason="").summary.startswith(
        "ZeRO 0 (the first whose states fit: 4.0"
    )


@pytest.mark.parametrize(
    ("name", "hint"), [("zero9", "did you mean zero?"), ("fast", "available: auto, ddp, zero1, ")]
)
def test_an_unknown_preset_gets_a_near_match_or_the_list(name, hint):
    with pytest.raises(ValueError, match=re.escape(f"unknown preset {name}; {hint}")):
        DeepSpeedConfig(preset=name)
