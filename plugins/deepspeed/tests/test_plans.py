"""The plan of a trained model: its stage, its states and DeepSpeed's settings."""

import pytest
import torch
from attrs import evolve
from plans import SHAPE, config, half, plan

from rlhf.engine import GIB, Mesh
from rlhf.errors import RLHFError
from rlhf.plugin import ModelConfig, OptimConfig
from rlhf_plugin_deepspeed import capabilities, memory, zero
from rlhf_plugin_deepspeed.layouts import layouts
from rlhf_plugin_deepspeed.memory import estimate


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
    made = zero.plan(run, mesh, SHAPE)
    assert made.stage == 2


def test_the_summary_states_the_reason():
    assert plan(8, 80 * GIB).summary == (
        "ZeRO 1 (the first whose states fit: 38.50 GiB in 60% of 80.0 GiB), bf16, 8 ranks, "
        "torch AdamW (fused)"
    )
    assert plan(1, 80 * GIB).summary == (
        "ZeRO 0 (no stage fits: 112.0 GiB of states, 60% of 80.0 GiB; offload or add ranks), "
        "bf16, 1 rank, torch AdamW (fused)"
    )
    assert plan(2, 80 * GIB, preset="zero2_offload").summary == (
        "ZeRO 2, bf16, 2 ranks, torch AdamW (fused), optimizer on the CPU"
    )


@pytest.mark.parametrize("mode", ["auto", "always", "never"])
def test_states_stay_where_they_are_if_the_optimizer_is_on_the_cpu(mode):
    assert plan(2, 80 * GIB, stage=2, offload_states=mode).offload_states == mode
    offloaded = plan(2, 80 * GIB, preset="zero2_offload", offload_states=mode)
    assert offloaded.offload_states == "never"
    assert offloaded.summary.endswith(
        "torch AdamW (fused), optimizer on the CPU"
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


def test_the_update_of_bf16_states_takes_less_on_the_device_of_the_mesh(monkeypatch):
    monkeypatch.setattr(memory, "fused_on", lambda kind: kind == "cuda")
    run = evolve(half(), optim=OptimConfig(states="bf16"))
    slow, fused = (
        estimate(run, plan(8, 80 * GIB), SHAPE, world=8, trained=True, device=device)
        for device in ("cpu", "cuda")
    )
    assert slow["updating"] > fused["updating"]


def test_the_update_of_lion_also_takes_its_signs():
    parts = [
        estimate(run, plan(8, 80 * GIB, stage=2), SHAPE, world=8, trained=True)
        for run in (half(), evolve(half(), optim=OptimConfig(name="lion")))
    ]
    adamw, lion = (part["updating"] for part in parts)
    assert lion - adamw == 4 * SHAPE.trainable // 8


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
        "zero_optimization.contiguous_gradients is false, but deepspeed 0.19.0 then sums gradients "
        f"incorrectly at stage {stage}; set it to true, or run pip install "
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
        "reduce_scatter": True,
        "reduce_bucket_size": 200_000_000,
        "allgather_bucket_size": 200_000_000,
        "stage3_prefetch_bucket_size": 50_000_000,
        "stage3_param_persistence_threshold": 0,
        "memory_efficient_linear": False,
    }


def test_models_that_are_loaded_leave_less_room_for_the_next():
    run = evolve(config(), model=ModelConfig(dtype="bf16"))
    mesh = Mesh(world=8, device=torch.device("cpu"), memory=80 * GIB)
    made = zero.plan(run, mesh, SHAPE, occupied=16 * GIB)
    assert made.summary == (
        "ZeRO 2 (the first whose states fit: 26.25 GiB in 60% of 80.0 GiB less 16.0 GiB of other "
        "models), bf16, 8 ranks, torch AdamW (fused)"
    )


def test_states_in_bf16_are_deepspeeds_own_settings():
    mesh = Mesh(world=1, device=torch.device("cpu"), memory=80 * GIB)
    run = evolve(
        config(stage=1), model=ModelConfig(dtype="bf16"), optim=OptimConfig(states="bf16", clip=0.5)
    )
    made = zero.plan(run, mesh, SHAPE)
    assert made.settings["bf16"]["bf16_optimizer_states"] is True
    assert made.settings["zero_allow_untested_optimizer"] is True


def test_without_a_known_memory_the_first_stage_is_taken():
    assert plan(4, 0).summary == (
        "ZeRO 0 (the device's memory is unknown), bf16, 4 ranks, torch AdamW (fused)"
    )


def test_a_base_in_four_bits_is_counted_so():
    adapters = evolve(SHAPE, trainable=GIB // 100)
    mesh = Mesh(world=1, device=torch.device("cpu"), memory=24 * GIB)
    run = evolve(config(), model=ModelConfig(dtype="bf16", quantize="nf4"))
    assert zero.plan(run, mesh, adapters).summary.startswith(
        "ZeRO 0 (the first whose states fit: 4.0"
    )


ROUTERS = evolve(SHAPE, fp32=GIB, fp32_trainable=GIB)
"""A gibi of parameters stays in fp32."""


@pytest.mark.parametrize(
    ("stage", "weights", "gradients"), [(0, 16, 16), (1, 16, 16), (2, 16, 8), (3, 8, 0)]
)
def test_weights_in_fp32_take_four_bytes(stage, weights, gradients):
    made = plan(2, 200 * GIB, stage=stage, shape=ROUTERS)
    parts, without = (
        estimate(half(), made, shape, world=2, trained=True) for shape in (ROUTERS, SHAPE)
    )
    gathered = 2 * min(SHAPE.parameters, 1_500_000_000) if stage == 3 else 0
    assert parts["weights"] == weights * GIB + gathered
    assert parts.get("gradients", 0) == gradients * GIB
    assert parts["masters"] == without["masters"]
    frozen = estimate(half(), made, ROUTERS, world=2, trained=False)
    assert frozen["weights"] == parts["weights"]
    in_fp32 = estimate(half("fp32"), made, ROUTERS, world=2, trained=True)
    assert in_fp32 == estimate(half("fp32"), made, SHAPE, world=2, trained=True)


@pytest.mark.parametrize(
    ("name", "settings", "states"),
    [
        ("deepspeed.offload_param", {"preset": "zero3_offload"}, "fp32"),
        ("deepspeed.nvme_path", {"preset": "zero2_offload", "nvme_path": "/nvme"}, "fp32"),
        ("optim.states bf16", {"stage": 2}, "bf16"),
    ],
)
def test_what_would_train_weights_in_fp32_in_one_dtype_with_others_is_refused(
    name, settings, states
):
    run = evolve(half(**settings), optim=OptimConfig(states=states))
    with pytest.raises(RLHFError) as error:
        zero.plan(run, Mesh(), ROUTERS)
    assert str(error.value) == (
        f"{name} cannot be combined with trained weights that transformers keeps in fp32, which "
        f"model.path {run.model.path} has; remove it, or a preset that sets it, or train an "
        "adapter with lora"
    )
    frozen = evolve(ROUTERS, fp32_trainable=0)
    assert zero.plan(run, Mesh(), frozen).stage == zero.plan(run, Mesh(), SHAPE).stage
    assert layouts(run, Mesh(), ROUTERS) == [
        way
        for way in layouts(run, Mesh(), SHAPE)
        if name == "deepspeed.offload_param" and "parameters on the CPU" not in way.name
    ]
