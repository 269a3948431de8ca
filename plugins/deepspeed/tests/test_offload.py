"""States leave the device by kind and come back bit for bit, at every stage, under every optimizer
and with frozen parameters."""

import filecmp

import pytest
import torch

from rlhf_devkit.problem import (
    Case,
    Packed,
    configure,
    follow,
    losses,
    make_batch,
    shape,
    whole_weights,
)
from rlhf_plugin_deepspeed.backend import DeepSpeedBackend
from rlhf_plugin_deepspeed.config import DeepSpeedConfig

KINDS = ("optimizer", "masters", "gradients", "weights")
STAGES = (
    {"stage": 0},
    {"stage": 1},
    {"stage": 2},
    # Norms and biases stay whole on every rank.
    {"stage": 3, "persistence_threshold": 40},
)
FROZEN = ("model.layers.0.up.weight", "model.layers.1.norm.bias")
PRECISIONS = [("fp32", "fp32"), ("bf16", "fp32"), ("bf16", "bf16")]


class Restless(DeepSpeedBackend):
    """Moves states to the host and back around every backward and every step, the kinds one by one
    and together."""

    def prepare(self, **given):
        engine = super().prepare(**given)
        step, backward = engine.step, engine.backward

        def moved_step():
            self.move(engine)
            outcome = step()
            self.move(engine)
            return outcome

        def moved_backward(loss, *, last):
            self.move(engine)
            backward(loss, last=last)

        engine.step, engine.backward = moved_step, moved_backward
        return engine

    def move(self, engine):
        for kinds in (*((kind,) for kind in KINDS), KINDS):
            self.offload_states(engine, kinds)
            assert self.offload_states(engine, kinds) == 0
            self.reload_states(engine, kinds)
            self.reload_states(engine, kinds)


def train(backend, case):
    """The outcome and the final weights."""
    outcome, engine, mesh = follow(backend, case)
    weights = whole_weights(DeepSpeedBackend(), engine)
    backend.close_mesh(mesh)
    return outcome, weights


def train_both(folder, settings, options, precision):
    """The same run with states that stay and with states that move; each saves at its end."""
    dtype, states = precision
    config = configure(DeepSpeedConfig(**settings), dtype=dtype, states=states)
    return [
        train(backend, Case(config=config, micro_batches=2, save=(4, folder / name), **options))
        for name, backend in (("stays", DeepSpeedBackend()), ("moves", Restless()))
    ]


TRAINED = {"frozen weights": {"frozen": FROZEN}, "adapter": {"adapter": True}}


def cases():
    """All precisions at all stages; an adapter once at each stage by default."""
    for trained in TRAINED:
        for settings in STAGES:
            for precision in PRECISIONS:
                quick = trained == "frozen weights" or precision == ("bf16", "fp32")
                marks = [] if quick else [pytest.mark.matrix]
                name = f"{settings}-{precision}-{trained}"
                yield pytest.param(settings, precision, TRAINED[trained], marks=marks, id=name)


@pytest.mark.parametrize(("settings", "precision", "options"), cases())
def test_states_that_move_change_no_bit(pair, tmp_path, settings, precision, options):
    for name in ("stays", "moves"):
        (tmp_path / name).mkdir()
    for (stays, weights), (moves, others) in pair.run(
        train_both, tmp_path, settings, options, precision
    ):
        assert moves == stays
        assert all(torch.equal(value, others[name]) for name, value in weights.items())
    files = sorted(path.name for path in (tmp_path / "stays").iterdir())
    assert files == sorted(path.name for path in (tmp_path / "moves").iterdir())
    same, *_ = filecmp.cmpfiles(tmp_path / "stays", tmp_path / "moves", files, shallow=False)
    assert same == files


def stores(tensors):
    """The storages that hold these tensors."""
    return {item.untyped_storage() for item in tensors if item.numel()}


def storages_by_kind(backend, engine):
    """The storages of each kind, as the checkpoint and the module know them."""
    state = backend.save_checkpoint(engine).fragments
    weights = stores(
        item
        for parameter in engine.module.parameters()
        for item in (parameter, getattr(parameter, "ds_tensor", parameter))
    )
    trained = {item.name for item in state if item.kind == "exp_avg"}
    masters = (item.values for item in state if item.kind == "weight" and item.name in trained)
    groups = getattr(engine.deepspeed.optimizer, "averaged_gradients", {}).values()
    gradients = [item for group in groups for item in group or ()]
    gradients += [item.grad for item in engine.module.parameters()]
    return {
        "optimizer": stores(item.values for item in state if item.kind.startswith("exp_avg")),
        "masters": stores(masters) - weights,
        "gradients": stores(item for item in gradients if item is not None),
        "weights": weights,
    }


def held(storages):
    return {kind: sum(item.nbytes() for item in items) for kind, items in storages.items()}


def bytes_by_kind(settings, precision):
    """Bytes by kind: at first, while each kind is on the host, and at last; with what each call
    released."""
    dtype, states = precision
    backend = DeepSpeedBackend()
    config = configure(DeepSpeedConfig(**settings), dtype=dtype, states=states)
    _, engine, mesh = follow(backend, Case(config=config, steps=1))
    loss = engine(make_batch(2, range(4), engine.device), losses)["loss"].sum()
    engine.backward(loss, last=True)
    storages = storages_by_kind(backend, engine)
    before, during = held(storages), {}
    for kind in KINDS:
        released = backend.offload_states(engine, [kind])
        during[kind] = (released, held(storages))
        backend.reload_states(engine, [kind])
    after = held(storages)
    backend.close_mesh(mesh)
    return before, during, after


@pytest.mark.parametrize("precision", PRECISIONS, ids=str)
@pytest.mark.parametrize("settings", STAGES, ids=str)
def test_each_kind_leaves_the_device_and_no_other(pair, settings, precision):
    for before, during, after in pair.run(bytes_by_kind, settings, precision):
        assert before == after
        assert all(before[kind] for kind in ("optimizer", "gradients", "weights"))
        for kind, (released, sizes) in during.items():
            assert sizes == before | {kind: 0}
            assert (released > 0) == (before[kind] > 0)


@pytest.mark.parametrize(
    ("settings", "precision", "own"),
    [
        ({"stage": 0}, ("fp32", "fp32"), False),
        ({"stage": 0}, ("bf16", "fp32"), True),
        ({"stage": 2}, ("bf16", "fp32"), True),
        ({"stage": 2}, ("bf16", "bf16"), False),
        ({"stage": 3, "persistence_threshold": 0}, ("fp32", "fp32"), True),
    ],
    ids=str,
)
def test_weights_that_the_optimizer_updates_itself_are_not_masters(pair, settings, precision, own):
    for before, *_ in pair.run(bytes_by_kind, settings, precision):
        assert (before["masters"] > 0) == own


def run_frozen(settings):
    """Losses of a frozen engine before and after its weights were away, and what was released."""
    backend = DeepSpeedBackend()
    config = configure(DeepSpeedConfig(**settings))
    mesh = backend.setup_mesh(config)
    plan = backend.configure_zero(config, mesh, shape(), "reference", False, 0)
    with backend.model_context(plan, "reference", mesh):
        module = Packed()
    engine = backend.prepare(module, None, None, "reference", plan, mesh)
    batch = make_batch(0, range(4), engine.device)
    with torch.no_grad():
        first = engine(batch, losses)["loss"]
        released = [backend.offload_states(engine, [kind]) for kind in KINDS]
        whole = held({"weights": stores(engine.module.parameters())})["weights"]
        backend.reload_states(engine, KINDS)
        second = engine(batch, losses)["loss"]
    backend.close_mesh(mesh)
    return torch.equal(first, second), released, whole


@pytest.mark.parametrize("settings", [{"frozen": 0}, {"frozen": 3}], ids=str)
def test_a_frozen_engine_has_only_weights_to_move(pair, settings):
    for same, released, left in pair.run(run_frozen, settings):
        assert same
        assert released[:3] == [0, 0, 0]
        assert released[3] > 0
        assert left == 0
