"""Muon: the matrices that it updates, its values beside torch's, and matrices that ZeRO cuts."""

import pytest
import torch
from deepspeed.accelerator import get_accelerator
from peft import LoraConfig, get_peft_model
from plans import SHAPE, half, plan
from test_optimizers import LAYOUTS, run
from transformers import AutoModelForCausalLM, Qwen3MoeConfig

from rlhf.engine import Mesh
from rlhf.errors import RLHFError
from rlhf_devkit.problem import Case, Packed, configure, follow
from rlhf_devkit.ranks import shared
from rlhf_plugin_deepspeed import muon, plugin
from rlhf_plugin_deepspeed.backend import DeepSpeedBackend
from rlhf_plugin_deepspeed.capabilities import check_capabilities
from rlhf_plugin_deepspeed.checkpoint import Piece
from rlhf_plugin_deepspeed.config import DeepSpeedConfig
from rlhf_plugin_deepspeed.memory import estimate
from rlhf_plugin_deepspeed.muon import Exchange, Muon, hidden_matrices
from rlhf_plugin_deepspeed.plans import ZeroPlan

GROUP = {"lr": 0.02, "weight_decay": 0.1}


def whole(parameter):
    return Piece(parameter=parameter, offset=0, master=parameter, start=0, size=parameter.numel())


def test_steps_are_those_of_torch():
    ours, theirs = Packed(), Packed()
    theirs.load_state_dict(ours.state_dict())
    matrices, others = hidden_matrices(ours), hidden_matrices(theirs)
    groups = [{"params": list(ours.parameters()), "weight_decay": 0.1}]
    optimizer = Muon(groups, matrices=matrices, lr=0.02, betas=(0.9, 0.999), eps=1e-8)
    assert optimizer.notes == ["optimizer  Muon for 4 matrices, AdamW for 9 others"]
    optimizer.exchange = Exchange(
        [whole(item) for item in ours.parameters()], ZeroPlan(stage=0, precision="bf16"), Mesh()
    )
    rest = [item for item in theirs.parameters() if item not in others]
    pair = (
        torch.optim.Muon(list(others), **GROUP, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(rest, **GROUP),
    )
    for _ in range(4):
        for item, other in zip(ours.parameters(), theirs.parameters(), strict=True):
            item.grad = torch.randn_like(item)
            other.grad = item.grad.clone()
        optimizer.step()
        for each in pair:
            each.step()
    for item, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(item, other)


def names(model):
    matrices = hidden_matrices(model)
    return {name for name, item in model.named_parameters() if item in matrices}


def test_it_updates_the_matrices_of_the_layers():
    config = Qwen3MoeConfig(
        vocab_size=40, hidden_size=16, intermediate_size=24, moe_intermediate_size=8,
        num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1, num_experts=2,
        attention_bias=True,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config)
    attention = {f"model.layers.0.self_attn.{name}_proj.weight" for name in "qkvo"}
    experts = {f"model.layers.0.mlp.experts.{name}" for name in ("gate_up_proj", "down_proj")}
    assert names(model) == attention | experts | {"model.layers.0.mlp.gate.weight"}
    adapted = get_peft_model(model, LoraConfig(r=2, target_modules=["q_proj"]))
    factor = "base_model.model.model.layers.0.self_attn.q_proj.lora_{}.default.weight"
    assert names(adapted) == {factor.format("A"), factor.format("B")}


CUT = ("model.layers.0.up.weight",)
"""Without one of the four matrices, parts of ranks begin and end inside of others."""


@pytest.fixture(scope="module")
def curve(single):
    config = configure(DeepSpeedConfig(stage=0), optimizer="muon")
    return single.run(run, Case(config=config, frozen=CUT))[0][0]


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_matrices_that_ranks_cut_follow_the_same_curve(curve, stage, ranks):
    small = {"persistence_threshold": 0} if stage == 3 else {}
    config = configure(DeepSpeedConfig(stage=stage, **small), optimizer="muon")
    micro = 2 if ranks == 2 else 1
    for outcome, _ in shared(ranks).run(run, Case(config=config, frozen=CUT, micro_batches=micro)):
        assert outcome.losses == pytest.approx(curve.losses, rel=1e-5)
        assert outcome.norms == pytest.approx(curve.norms, rel=1e-4)


def follow_states(case):
    """The outcome, the states at the end and the bytes of moments that can leave the device, with
    the CPU taken for an accelerator that has fp16."""
    backend = DeepSpeedBackend()
    get_accelerator().is_fp16_supported = lambda: True
    try:
        outcome, engine, mesh = follow(backend, case)
    finally:
        del get_accelerator().is_fp16_supported
    state = backend.save_checkpoint(engine).fragments
    states = {f"{item.name}/{item.kind}": item.values.clone() for item in state}
    released = backend.offload_states(engine, ["optimizer"])
    backend.reload_states(engine, ["optimizer"])
    backend.close_mesh(mesh)
    return outcome, states, released


@pytest.mark.parametrize("settings", LAYOUTS, ids=str)
def test_fp16_follows_the_same_curve_and_skipped_steps_leave_no_moments(pair, curve, settings):
    def final(steps, **options):
        config = configure(DeepSpeedConfig(**settings, **options), optimizer="muon", dtype="fp16")
        return pair.run(follow_states, Case(config=config, frozen=CUT, steps=steps))[0]

    outcome, states, _ = final(4, config={"fp16": {"initial_scale_power": 8}})
    assert outcome.moved == [True] * 4
    assert outcome.losses == pytest.approx(curve.losses, rel=1e-2)
    assert any("/exp_avg" in name and value.any() for name, value in states.items())
    outcome, states, _ = final(2)
    assert outcome.skipped == [True, True]
    assert not any("/exp_avg" in name and value.any() for name, value in states.items())


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_states_that_leave_the_device_between_steps_change_no_bit(pair, stage, dtype):
    small = {"persistence_threshold": 40} if stage == 3 else {}
    config = configure(DeepSpeedConfig(stage=stage, **small), optimizer="muon", dtype=dtype)
    stays, moves = (
        pair.run(follow_states, Case(config=config, frozen=CUT, micro_batches=2, moves=moves))
        for moves in (False, True)
    )
    for (straight, states, _), (outcome, others, released) in zip(stays, moves, strict=True):
        assert outcome == straight
        assert all(torch.equal(value, others[name]) for name, value in states.items())
        assert released > 0


def run_in_small_groups(case):
    before, muon.AT_ONCE = muon.AT_ONCE, 600
    try:
        return run(case)
    finally:
        muon.AT_ONCE = before


@pytest.mark.parametrize("stage", [0, 2])
def test_matrices_that_are_put_together_in_turn_follow_the_same_curve(curve, stage):
    config = configure(DeepSpeedConfig(stage=stage), optimizer="muon")
    ((outcome, _), _) = shared(2).run(run_in_small_groups, Case(config=config, frozen=CUT))
    assert outcome.losses == pytest.approx(curve.losses, rel=1e-5)


def test_without_a_matrix_that_is_trained_it_is_refused(single):
    frozen = [name for name, item in Packed().named_parameters() if "layers" in name]
    config = configure(DeepSpeedConfig(stage=2), optimizer="muon")
    assert single.run(run, Case(config=config, frozen=tuple(frozen))) == [
        "optim.name muon updates the matrices of the decoder's layers, none of which is trained "
        "here; set optim.name to adamw"
    ]


def test_adapters_that_stack_experts_are_refused():
    settings = ("lora.parameters", "optim.name muon")
    with pytest.raises(RLHFError) as error:
        check_capabilities(settings, stage=2, precision="fp32", version="0.19.8")
    assert str(error.value) == (
        "lora.parameters cannot be combined with optim.name muon; remove one of the two"
    )


def test_the_estimate_counts_two_states_of_what_adamw_updates(monkeypatch):
    run = half()
    monkeypatch.setattr(type(run), "optimizers", plugin.optimizers)
    object.__setattr__(run, "optim", configure(optimizer="muon").optim)
    ends = SHAPE.head
    for stage, world in ((0, 1), (2, 8)):
        made = plan(world, 800 * 2**30, stage=stage)
        parts = estimate(run, made, SHAPE, world=world, trained=True)
        expected = (4 * (SHAPE.parameters - ends) + 8 * ends) // world
        assert parts["optimizer"] == pytest.approx(expected, rel=1e-6)
        adamw = estimate(half(), made, SHAPE, world=world, trained=True)
        at_once = 10**9 // (world if stage else 1)
        assert parts["updating"] - adamw["updating"] == 4 * (at_once + SHAPE.mean_layer)
