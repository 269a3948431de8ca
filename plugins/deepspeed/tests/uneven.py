"""Engines, steps and losses of the tests of gradients."""

from attrs import evolve

from rlhf_devkit.problem import ROWS, Case, configure, follow, losses, make_batch, start
from rlhf_plugin_deepspeed.backend import DeepSpeedBackend
from rlhf_plugin_deepspeed.config import DeepSpeedConfig


def case_of(settings, dtype="fp32", states="fp32", **more):
    config = configure(DeepSpeedConfig(**settings), dtype=dtype, states=states)
    return Case(config=config, **more)


class Changed(DeepSpeedBackend):
    """A backend under settings of DeepSpeed that somebody has changed."""

    def __init__(self, changes):
        self.changes = changes

    def configure_zero(self, **given):
        plan = super().configure_zero(**given)
        settings = dict(plan.settings)
        for name, changes in self.changes.items():
            settings[name] = settings.get(name, {}) | changes
        return evolve(plan, settings=settings)


def without_head(hidden, head, batch):
    """A loss that leaves the head without a gradient."""
    return {"loss": hidden.square().mean(dim=(1, 2)) * batch["weight"]}


def step(mesh, engine, readouts):
    """The norm in a step whose micro-batches have these losses."""
    for number, readout in enumerate(readouts, start=1):
        rows = [(4 * (number - 1) + mesh.rank + more) % ROWS for more in (0, 2)]
        loss = engine(make_batch(0, rows, engine.device), readout)["loss"].sum() / ROWS
        engine.backward(loss, last=number == len(readouts))
    return engine.step().read().grad_norm


def train(settings, more=None):
    """The outcome of a short training."""
    backend = DeepSpeedBackend()
    outcome, _, mesh = follow(backend, case_of(settings, **(more or {})))
    backend.close_mesh(mesh)
    return outcome


def norms_of(settings, readouts_by_rank):
    """The gradient's norms in a step whose micro-batches have these losses and in the one after it;
    all losses before and after have gradients for the head."""
    backend = DeepSpeedBackend()
    mesh, engine, _ = start(backend, case_of(settings, tied=False))
    readouts = readouts_by_rank[mesh.rank]
    everywhere = (losses,) * len(readouts)
    _, *found = [step(mesh, engine, each) for each in (everywhere, readouts, everywhere)]
    backend.close_mesh(mesh)
    return found


HEADS = {
    "in the first micro-batch": [(losses, without_head)] * 2,
    "in the last micro-batch": [(without_head, losses)] * 2,
    "on one rank": [(losses,), (without_head,)],
    "on the other, later": [(without_head, losses), (losses, without_head)],
    "nowhere": [(without_head,)] * 2,
}
