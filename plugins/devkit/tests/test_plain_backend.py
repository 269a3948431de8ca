"""The plain backend answers every hook, and its numbers are those of torch."""

import inspect

import pluggy
import pytest
import torch

from rlhf import hookspecs
from rlhf.engine import Mesh
from rlhf.errors import RLHFError
from rlhf.train.fragments import SavedEngine
from rlhf_devkit.plain import PlainBackend
from rlhf_devkit.problem import Case, Packed, configure, follow, initial_weights, shape, start


def weights(engine):
    return {name: value.clone() for name, value in engine.module.state_dict().items()}


def test_it_answers_every_hook_that_core_has_no_default_for():
    manager = pluggy.PluginManager("rlhf")
    manager.add_hookspecs(hookspecs.BackendHooks)
    manager.register(PlainBackend())
    manager.check_pending()
    hooks = {name for name in vars(hookspecs.BackendHooks) if not name.startswith("_")}
    answered = {name for name in hooks if getattr(manager.hook, name).get_hookimpls()}
    assert hooks - answered == {
        "axis_sizes",
        "build_schedule",
        "layouts",
        "offload_states",
        "reload_states",
        "shard",
    }
    for name in answered:
        given = inspect.signature(getattr(PlainBackend, name)).parameters.values()
        assert all(parameter.default is inspect.Parameter.empty for parameter in given)


def test_micro_batches_do_not_change_the_curve():
    whole, _, _ = follow(PlainBackend(), Case(config=configure()))
    parts, _, _ = follow(PlainBackend(), Case(config=configure(), micro_batches=4))
    assert parts.losses == pytest.approx(whole.losses, rel=1e-6)
    assert parts.norms == pytest.approx(whole.norms, rel=1e-6)
    assert whole.rates == pytest.approx([0.02, 0.02 / 2, 0.02 / 3, 0.02 / 4])


def test_the_norm_is_that_before_clipping():
    clipped, _, _ = follow(PlainBackend(), Case(config=configure(clip=0.5), steps=1))
    free, _, _ = follow(PlainBackend(), Case(config=configure(clip=0.0), steps=1))
    assert clipped.norms == free.norms
    assert clipped.norms[0] > 0.5


def test_a_gradient_that_is_not_finite_changes_no_weight():
    _, before, _ = follow(PlainBackend(), Case(config=configure(), steps=1))
    poisoned = Case(config=configure(), steps=2, poison=(1, 0))
    outcome, after, _ = follow(PlainBackend(), poisoned)
    assert outcome.moved == [True, False]
    expected, found = weights(before), weights(after)
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_two_steps_and_four_more_after_a_resume_are_six(tmp_path):
    saved = Case(config=configure(), steps=6, save=(2, tmp_path))
    straight, engine, _ = follow(PlainBackend(), saved)
    later, resumed, _ = follow(PlainBackend(), Case(config=configure(), steps=6, load=tmp_path))
    assert later.state == {"step": 2}
    assert later.losses == straight.losses[2:]
    assert later.rates == straight.rates[2:]
    expected, found = weights(engine), weights(resumed)
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_the_weights_of_a_checkpoint_open_without_an_engine(tmp_path):
    case = Case(config=configure(), steps=1, tied=False, save=(1, tmp_path))
    _, engine, _ = follow(PlainBackend(), case)
    found = SavedEngine(tmp_path).weights()
    assert all(torch.equal(found[name], value) for name, value in weights(engine).items())


def test_a_precision_it_does_not_have_is_refused():
    with pytest.raises(RLHFError) as error:
        PlainBackend().setup_mesh(configure(dtype="bf16"))
    assert str(error.value) == (
        "the plain backend does not support model.dtype bf16; set model.dtype to fp32 or choose "
        "another backend"
    )


def test_loading_names_the_missing_weights():
    backend, module = PlainBackend(), Packed(tied=False)
    plan = backend.configure_zero(configure(), Mesh(), shape(), "policy", True, 0)
    given = initial_weights(tied=False)
    del given["model.layers.0.up.bias"]
    assert backend.load_weights(module, given, plan, Mesh()) == ("model.layers.0.up.bias",)


def test_generation_runs_in_evaluation_mode_and_restores_the_mode():
    backend = PlainBackend()
    _, engine, _ = start(backend, Case(config=configure()))
    engine.train()
    with backend.generation_context(engine):
        assert not engine.module.training
        assert not torch.is_grad_enabled()
    assert engine.module.training
