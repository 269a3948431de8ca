"""What is saved comes back bit for bit, opens without an engine, and is refused by another
layout."""

import pytest
import torch

from rlhf.errors import RLHFError
from rlhf.testing.plain import PlainBackend
from rlhf.testing.problem import Case, configure, follow
from rlhf_plugin_deepspeed import checkpoint
from rlhf_plugin_deepspeed.backend import DeepSpeedBackend
from rlhf_plugin_deepspeed.config import DeepSpeedConfig
from rlhf_plugin_deepspeed.weights import gathered

LAYOUTS = (
    {"stage": 0},
    {"stage": 1},
    {"stage": 2},
    # Norms and biases stay whole on every rank.
    {"stage": 3, "persistence_threshold": 40},
    {"preset": "zero1_offload"},
    {"preset": "zero2_offload"},
    {"preset": "zero3_offload", "persistence_threshold": 0},
)
FROZEN = ("model.layers.0.up.weight", "model.layers.1.norm.bias")


def run(case):
    """The outcome and the final weights, on whichever rank this is."""
    backend = DeepSpeedBackend()
    outcome, engine, mesh = follow(backend, case)
    weights = {name: value.clone() for name, value in gathered(engine, trained_only=False)}
    backend.close_mesh(mesh)
    return outcome, weights


def refusal(case):
    """What resuming says."""
    try:
        run(case)
    except RLHFError as error:
        return str(error)
    return ""


def read(directory):
    return DeepSpeedBackend().read_weights(directory)


@pytest.mark.parametrize("dtype", [pytest.param("fp32", marks=pytest.mark.matrix), "bf16"])
@pytest.mark.parametrize("settings", LAYOUTS, ids=str)
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


@pytest.mark.parametrize("settings", LAYOUTS, ids=str)
@pytest.mark.parametrize("tied", [True, pytest.param(False, marks=pytest.mark.matrix)])
def test_the_weights_of_a_checkpoint_are_the_engines(pair, tmp_path, settings, tied):
    config = configure(DeepSpeedConfig(**settings))
    case = Case(config=config, steps=2, tied=tied, frozen=FROZEN, save=(2, tmp_path))
    _, weights = pair.run(run, case)[0]
    saved = read(tmp_path)
    assert set(saved) == set(weights)
    assert all(torch.equal(saved[name], weights[name]) for name in weights)


@pytest.mark.parametrize("settings", LAYOUTS[:4], ids=str)
def test_the_weights_of_a_bf16_checkpoint_are_its_masters(single, tmp_path, settings):
    config = configure(DeepSpeedConfig(**settings), dtype="bf16")
    case = Case(config=config, steps=2, frozen=FROZEN, save=(2, tmp_path))
    ((_, weights),) = single.run(run, case)
    saved = read(tmp_path)
    assert set(saved) == set(weights)
    assert {value.dtype for value in saved.values()} == {torch.float32}
    assert all(torch.equal(saved[name].to(weights[name].dtype), weights[name]) for name in weights)
    trained = saved["model.layers.0.up.bias"]
    assert not torch.equal(trained, trained.bfloat16().float())


def run_clipped(case):
    """As `run`, with the clipping in its checkpoint that earlier versions wrote there."""
    save = checkpoint.save

    def save_clipped(engine, directory, state):
        engine.deepspeed.optimizer.clip_grad = 0.5
        save(engine, directory, state)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checkpoint, "save", save_clipped)
        return run(case)


@pytest.mark.parametrize("stage", [1, 2])
def test_a_checkpoint_over_bf16_states_resumes_whoever_clipped_it(single, tmp_path, stage):
    config = configure(DeepSpeedConfig(stage=stage), dtype="bf16", states="bf16")
    ((outcome, _),) = single.run(run_clipped, Case(config=config, steps=3, save=(3, tmp_path)))
    ((straight, _),) = single.run(run, Case(config=config, steps=5))
    ((later, _),) = single.run(run, Case(config=config, steps=5, load=tmp_path))
    assert outcome.losses == straight.losses[:3]
    assert later.losses == straight.losses[3:]
    assert later.norms == straight.norms[3:]


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
    assert set(read(tmp_path)) == {name for name in weights if "lora_" in name}


def test_another_stage_or_number_of_ranks_is_refused(pair, single, tmp_path):
    written = configure(DeepSpeedConfig(stage=2))
    pair.run(run, Case(config=written, steps=1, save=(1, tmp_path)))
    other = configure(DeepSpeedConfig(stage=1))
    for text in pair.run(refusal, Case(config=other, load=tmp_path)):
        assert text == (
            f"the checkpoint {tmp_path} was written with stage 2 but this run has 1; resume it "
            "with deepspeed.stage 2"
        )
    (text,) = single.run(refusal, Case(config=written, load=tmp_path))
    assert text == (
        f"the checkpoint {tmp_path} was written with ranks 2 but this run has 1; resume it with "
        "--nproc 2"
    )


def test_a_folder_of_something_else_is_refused(tmp_path):
    with pytest.raises(RLHFError) as error:
        read(tmp_path)
    assert str(error.value) == (
        f"{tmp_path} is not a checkpoint of the deepspeed backend (deepspeed.json is missing); "
        "name a folder under checkpoints/ of a run, or resume with the backend that wrote it"
    )
