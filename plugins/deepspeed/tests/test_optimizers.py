"""Optimizers beside AdamW: the same curve in every layout, exact resumes, and one
that an extension brings."""

import pytest
import torch

from rlhf.errors import RLHFError
from rlhf_devkit.problem import Case, TinyModel, configure, follow, shape, whole_weights
from rlhf_devkit.ranks import shared
from rlhf_plugin_deepspeed import plugin
from rlhf_plugin_deepspeed.backend import DeepSpeedBackend
from rlhf_plugin_deepspeed.config import DeepSpeedConfig, check
from rlhf_plugin_deepspeed.kinds import TITLES
from rlhf_plugin_deepspeed.memory import bytes_per_parameter
from rlhf_plugin_deepspeed.optimizer import FlatAdamW, build

NAMES = [kind.name for kind in plugin.optimizers if kind.name != "adamw"]
LAYOUTS = (
    {"stage": 0},
    {"stage": 1},
    {"stage": 2},
    # Norms and biases stay whole on every rank.
    {"stage": 3, "persistence_threshold": 40},
    {"preset": "zero2_offload"},
    {"preset": "zero3_offload", "persistence_threshold": 0},
    {"stage": 3, "offload_optimizer": True, "offload_ratio": 0.5, "persistence_threshold": 0},
)
QUICK = {"lion": LAYOUTS[::2], "muon": LAYOUTS[1::2]}
"""Where the layouts of an optimizer are not marked `matrix`; of others it is the first."""


def combinations():
    """All optimizers in all layouts."""
    for name in NAMES:
        for settings in LAYOUTS:
            marks = [] if settings in QUICK.get(name, LAYOUTS[:1]) else [pytest.mark.matrix]
            yield pytest.param(name, settings, marks=marks, id=f"{name}-{settings}")


each_layout = pytest.mark.parametrize(("name", "settings"), [*combinations()])


def test_every_name_has_a_title():
    assert [*TITLES] == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_every_name_builds_an_optimizer_of_its_own(name):
    model = TinyModel()
    groups = [{"params": [*model.parameters()]}]
    assert type(build(groups, model, configure(optimizer=name))) is not FlatAdamW


class Adamax(DeepSpeedBackend):
    """The backend as the extension of docs/plugins.md leaves it."""

    def build_optimizer(self, groups, config, plan, model):
        filled = [dict(group) for group in groups if group["params"]]
        return torch.optim.Adamax(filled, lr=config.optim.lr, betas=config.optim.betas)


class Adafactor(DeepSpeedBackend):
    """An optimizer that keeps rows and columns."""

    def build_optimizer(self, groups, config, plan, model):
        return torch.optim.Adafactor([dict(group) for group in groups], lr=config.optim.lr)


def run(case, kind=DeepSpeedBackend):
    """The outcome and the final weights, on whichever rank this is."""
    backend = kind()
    try:
        outcome, engine, mesh = follow(backend, case)
        weights = whole_weights(DeepSpeedBackend(), engine)
    except RLHFError as error:
        return str(error)
    backend.close_mesh(mesh)
    return outcome, weights


@pytest.fixture(scope="module")
def whole(single):
    """The curves on one rank at stage 0, by optimizer."""
    config = DeepSpeedConfig(stage=0)
    return {
        name: single.run(run, Case(config=configure(config, optimizer=name)))[0][0]
        for name in NAMES
    }


@each_layout
def test_the_curve_is_the_same_in_every_layout(pair, whole, name, settings):
    config = configure(DeepSpeedConfig(**settings), optimizer=name)
    for outcome, _ in pair.run(run, Case(config=config, micro_batches=2)):
        assert outcome.losses == pytest.approx(whole[name].losses, rel=1e-5)
        assert outcome.norms == pytest.approx(whole[name].norms, rel=1e-5)


@each_layout
def test_bf16_keeps_fp32_masters(pair, whole, name, settings):
    config = configure(DeepSpeedConfig(**settings), optimizer=name, dtype="bf16")
    outcome, _ = pair.run(run, Case(config=config))[0]
    assert outcome.losses == pytest.approx(whole[name].losses, rel=2e-2)


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@each_layout
def test_a_resumed_run_continues_to_the_last_bit(pair, tmp_path, name, settings, dtype):
    config = configure(DeepSpeedConfig(**settings), optimizer=name, dtype=dtype)
    frozen = ("model.layers.0.up.weight", "model.layers.1.norm.bias")
    options = {"config": config, "steps": 6, "micro_batches": 2, "frozen": frozen}
    straight, weights = pair.run(run, Case(**options, save=(2, tmp_path)))[0]
    later, weights_later = pair.run(run, Case(**options, load=tmp_path))[0]
    assert later.losses == straight.losses[2:]
    assert all(torch.equal(weights[key], weights_later[key]) for key in weights)


@pytest.mark.parametrize(
    ("kind", "name"), [(DeepSpeedBackend, "lion"), (DeepSpeedBackend, "muon"), (Adamax, "adamw")]
)
@pytest.mark.parametrize(("source", "target"), [(2, 0), (3, 2)])
def test_a_checkpoint_continues_in_another_layout(tmp_path, kind, name, source, target):
    def case(stage, **options):
        config = configure(DeepSpeedConfig(stage=stage), optimizer=name)
        return Case(config=config, steps=6, **options)

    straight, _ = shared(2).run(run, case(source, save=(3, tmp_path)), kind)[0]
    ((later, _),) = shared(1).run(run, case(target, load=tmp_path), kind)
    assert later.losses == pytest.approx(straight.losses[3:], rel=1e-5)


def test_states_that_no_other_layout_could_read_are_not_saved(single, tmp_path):
    case = Case(config=configure(DeepSpeedConfig(stage=0)), steps=1, save=(1, tmp_path))
    assert single.run(run, case, Adafactor) == [
        "Adafactor keeps row_var, which does not have one element per weight, so that a checkpoint "
        "could not be read in another layout; use another optimizer"
    ]


@pytest.mark.parametrize("name", NAMES)
def test_bf16_states_are_refused(name):
    config = configure(DeepSpeedConfig(stage=2), optimizer=name, dtype="bf16", states="bf16")
    with pytest.raises(RLHFError) as error:
        check(config)
    assert str(error.value) == (
        f"optim.name {name} cannot be combined with optim.states bf16; remove one of the two"
    )


@pytest.mark.parametrize("name", ["adamw_8bit", "AdamW8bit"])
def test_moments_of_8_bits_are_refused_with_what_to_set_instead(name):
    with pytest.raises(RLHFError) as error:
        check(configure(DeepSpeedConfig(stage=2), optimizer=name))
    assert str(error.value) == (
        "optim.name: moments of 8 bits are not offered; set optim.states to bf16, which takes no "
        "more memory"
    )


@pytest.mark.parametrize(("name", "size"), [("adamw", 8), ("lion", 4), ("sgd", 4)])
def test_the_estimate_knows_the_number_of_states(name, size, monkeypatch):
    config = configure(DeepSpeedConfig(stage=2), optimizer=name)
    monkeypatch.setattr(type(config), "optimizers", plugin.optimizers)
    assert bytes_per_parameter(config, shape(), stage=2).optimizer == size
