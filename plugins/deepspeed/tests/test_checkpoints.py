"""What is saved comes back bit for bit, opens without an engine, and continues in any layout."""

import itertools

import pytest
import torch
from deepspeed.accelerator import get_accelerator

from rlhf_devkit.plain import PlainBackend
from rlhf_devkit.problem import Case, configure, follow, saved_weights, whole_weights
from rlhf_devkit.ranks import shared
from rlhf_plugin_deepspeed.backend import DeepSpeedBackend
from rlhf_plugin_deepspeed.config import DeepSpeedConfig

LAYOUTS = (
    {"stage": 0},
    {"stage": 1},
    {"stage": 2},
    # Norms and biases stay whole on every rank.
    {"stage": 3, "persistence_threshold": 40},
    {"preset": "zero1_offload"},
    {"preset": "zero2_offload"},
    {"preset": "zero3_offload", "persistence_threshold": 0},
    {"stage": 3, "offload_optimizer": True, "offload_ratio": 0.5, "persistence_threshold": 0},
)
SIMILAR = (LAYOUTS[1], *LAYOUTS[4:6])
"""Layouts that the kit of backends or the other layouts prove too."""
EACH_LAYOUT = [
    pytest.param(layout, marks=pytest.mark.matrix) if layout in SIMILAR else layout
    for layout in LAYOUTS
]
FROZEN = ("model.layers.0.up.weight", "model.layers.1.norm.bias")


def run(case):
    """The outcome and the final weights, on whichever rank this is."""
    backend = DeepSpeedBackend()
    outcome, engine, mesh = follow(backend, case)
    weights = whole_weights(DeepSpeedBackend(), engine)
    backend.close_mesh(mesh)
    return outcome, weights


@pytest.mark.parametrize("dtype", [pytest.param("fp32", marks=pytest.mark.matrix), "bf16"])
@pytest.mark.parametrize("settings", EACH_LAYOUT, ids=str)
def test_two_steps_and_four_more_after_a_resume_are_six(pair, tmp_path, settings, dtype):
    config = configure(DeepSpeedConfig(**settings), dtype=dtype)
    options = {"config": config, "steps": 6, "micro_batches": 2, "frozen": FROZEN}
    straight = pair.run(run, Case(**options, save=(2, tmp_path)))
    resumed = pair.run(run, Case(**options, load=tmp_path))
    for (outcome, weights), (later, weights_later) in zip(straight, resumed, strict=True):
        assert later.state == {"step": 2}
        assert later.losses == outcome.losses[2:]
        assert later.norms == outcome.norms[2:]
        assert later.rates == outcome.rates[2:]
        assert all(torch.equal(weights[name], weights_later[name]) for name in weights)


@pytest.mark.parametrize("settings", EACH_LAYOUT, ids=str)
@pytest.mark.parametrize("tied", [True, pytest.param(False, marks=pytest.mark.matrix)])
def test_the_weights_of_a_checkpoint_are_the_engines(pair, tmp_path, settings, tied):
    config = configure(DeepSpeedConfig(**settings))
    case = Case(config=config, steps=2, tied=tied, frozen=FROZEN, save=(2, tmp_path))
    _, weights = pair.run(run, case)[0]
    saved = saved_weights(tmp_path)
    assert set(saved) == set(weights) - ({"model.head.weight"} if tied else set())
    assert all(torch.equal(saved[name], weights[name]) for name in saved)


@pytest.mark.parametrize("settings", LAYOUTS[:4], ids=str)
def test_the_weights_of_a_bf16_checkpoint_are_its_masters(single, tmp_path, settings):
    config = configure(DeepSpeedConfig(**settings), dtype="bf16")
    case = Case(config=config, steps=2, frozen=FROZEN, save=(2, tmp_path))
    ((_, weights),) = single.run(run, case)
    saved = saved_weights(tmp_path)
    assert set(saved) == set(weights) - {"model.head.weight"}  # Tied to the embedding.
    assert {value.dtype for value in saved.values()} == {torch.float32}
    assert all(torch.equal(saved[name].to(weights[name].dtype), weights[name]) for name in saved)
    trained = saved["model.layers.0.up.bias"]
    assert not torch.equal(trained, trained.bfloat16().float())


@pytest.mark.parametrize("stage", [1, 2])
def test_a_checkpoint_over_bf16_states_resumes(single, tmp_path, stage):
    config = configure(DeepSpeedConfig(stage=stage), dtype="bf16", states="bf16")
    ((outcome, _),) = single.run(run, Case(config=config, steps=5, save=(3, tmp_path)))
    ((later, _),) = single.run(run, Case(config=config, steps=5, load=tmp_path))
    assert later.losses == outcome.losses[3:]
    assert later.norms == outcome.norms[3:]


@pytest.mark.parametrize("settings", LAYOUTS[:4], ids=str)
def test_only_the_adapter_is_saved_and_it_resumes(pair, tmp_path, settings):
    plain = follow(PlainBackend(), Case(config=configure(), adapter=True))[0]
    options = {"config": configure(DeepSpeedConfig(**settings)), "adapter": True}
    outcome, weights = pair.run(run, Case(**options, save=(2, tmp_path)))[0]
    assert outcome.losses == pytest.approx(plain.losses, rel=1e-5)
    assert outcome.norms == pytest.approx(plain.norms, rel=1e-5)
    later, weights_later = pair.run(run, Case(**options, load=tmp_path))[0]
    assert later.losses == outcome.losses[2:]
    assert all(torch.equal(weights[name], weights_later[name]) for name in weights)
    assert set(saved_weights(tmp_path)) == {name for name in weights if "lora_" in name}


PLACES = {
    "1 rank, stage 0": (1, {"stage": 0}),
    "2 ranks, stage 0": (2, {"stage": 0}),
    "2 ranks, stage 2": (2, {"stage": 2}),
    "2 ranks, stage 3": (2, {"stage": 3, "persistence_threshold": 40}),
    "2 ranks, offload": (2, {"preset": "zero2_offload"}),
    "2 ranks, part offloaded": (
        2,
        {"stage": 3, "offload_optimizer": True, "offload_ratio": 0.5, "persistence_threshold": 40},
    ),
    "4 ranks, stage 3": (4, {"stage": 3, "persistence_threshold": 0}),
}
QUICK = {
    ("1 rank, stage 0", "2 ranks, stage 3"),
    ("2 ranks, stage 2", "1 rank, stage 0"),
    ("2 ranks, stage 3", "2 ranks, stage 2"),
    ("2 ranks, part offloaded", "2 ranks, offload"),
    ("2 ranks, offload", "2 ranks, part offloaded"),
}


QUICK_OF_ADAPTER = {
    ("2 ranks, stage 2", "1 rank, stage 0"),
    ("1 rank, stage 0", "2 ranks, stage 3"),
}


def moves():
    """All moves from one place to another, of all weights and of an adapter."""
    for trained, quick in (("all weights", QUICK), ("adapter", QUICK_OF_ADAPTER)):
        for source, target in itertools.permutations(PLACES, 2):
            marks = [] if (source, target) in quick else [pytest.mark.matrix]
            name = f"{source} to {target}, {trained}"
            yield pytest.param(source, target, trained == "adapter", marks=marks, id=name)


@pytest.mark.parametrize(("source", "target", "adapter"), moves())
def test_a_checkpoint_continues_in_another_layout(tmp_path, source, target, adapter):
    def run_at(place, **options):
        ranks, settings = PLACES[place]
        config = configure(DeepSpeedConfig(**settings))
        frozen = () if adapter else FROZEN
        case = Case(config=config, steps=6, adapter=adapter, frozen=frozen, **options)
        return shared(ranks).run(run, case)[0][0]

    straight = run_at(source, save=(3, tmp_path))
    later = run_at(target, load=tmp_path)
    assert later.losses == pytest.approx(straight.losses[3:], rel=1e-5)
    assert later.norms == pytest.approx(straight.norms[3:], rel=1e-4)
    assert later.rates == straight.rates[3:]


def run_in_fp16(case):
    """As `run`, with the CPU taken for an accelerator that has fp16; the scale at the end too."""
    get_accelerator().is_fp16_supported = lambda: True
    backend = DeepSpeedBackend()
    try:
        outcome, engine, mesh = follow(backend, case)
        backend.close_mesh(mesh)
        return outcome, engine.loss_scale()
    finally:
        del get_accelerator().is_fp16_supported


@pytest.mark.parametrize(("source", "target"), [(0, 2), (2, 3), (3, 0)])
def test_the_loss_scale_of_fp16_is_saved_and_restored(pair, single, tmp_path, source, target):
    def case(stage, **options):
        config = configure(DeepSpeedConfig(stage=stage), dtype="fp16")
        return Case(config=config, steps=12, **options)

    straight, scale = pair.run(run_in_fp16, case(source, save=(8, tmp_path)))[0]
    ((later, scale_later),) = single.run(run_in_fp16, case(target, load=tmp_path))
    # The scale starts at 2^16, at which the first steps are skipped.
    assert scale < 2**16
    assert scale_later == scale
    assert later.skipped == straight.skipped[8:]
    assert later.losses == pytest.approx(straight.losses[8:], rel=1e-2)


def test_a_checkpoint_of_another_backend_continues(pair, tmp_path):
    plain = Case(config=configure(), steps=6, save=(3, tmp_path))
    straight, _, _ = follow(PlainBackend(), plain)
    case = Case(config=configure(DeepSpeedConfig(stage=3)), steps=6, load=tmp_path)
    later, _ = pair.run(run, case)[0]
    assert later.losses == pytest.approx(straight.losses[3:], rel=1e-5)
