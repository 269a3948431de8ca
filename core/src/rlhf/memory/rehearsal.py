"""A step of a run without values: the trainer's own code over models on the meta device.

Tensors there have shapes and no memory, so what a step would take is counted before any weight is
read, for any trainer and any model whose code does not look at values.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import attrs
import torch
from attrs import frozen
from torch import Tensor

from rlhf.config.sections import Config, ModelConfig
from rlhf.data.batch import PackedBatch
from rlhf.data.order import RunOrder, StepPlan
from rlhf.engine import Engine, Mesh, ModelShape, Readout
from rlhf.journal.sums import weighted_loss
from rlhf.memory.estimate import Estimate, LiveBytes
from rlhf.model.dropout import without_dropout
from rlhf.model.packed import PackedModel
from rlhf.model.probe import candidates_of
from rlhf.model.shape import empty_model, shape_of
from rlhf.model.task import Task
from rlhf.registry.gateway import BackendGateway
from rlhf.run.context import Run
from rlhf.trainer import Trainer

META = torch.device("meta")
LOOK_AHEAD = 64
"""Steps among which the largest micro-batch is looked for."""


class UnknownError(Exception):
    """What a step takes cannot be told without values."""


@frozen
class Rehearsed:
    """What came of a rehearsal."""

    estimate: Estimate
    lighter: tuple[str, ...]
    """The backend's settings that would take less."""
    shape: ModelShape
    """The policy's size."""


def rehearse(
    trainer: Trainer, config: Config, mesh: Mesh, hooks: BackendGateway, **options: Any
) -> Rehearsed:
    """What a step of `trainer` takes on each accelerator of `mesh`, without a collective.

    `options` are those of `Run`. Raises UnknownError, or what a model or a trainer raises that
    looks at values.
    """
    run = Rehearsal(config, trainer.tokenizer, mesh, hooks, **options)
    actor = type(trainer)(trainer.config, trainer.tokenizer)
    actor.setup(run)
    order = RunOrder.from_config(
        run.examples[0], config, actor, rank=mesh.rank, ranks=mesh.world, device=mesh.device
    )
    batch = run.without_values(largest(order, run.steps))
    policy = dict(run.states["policy"])
    updating, reducing = policy.pop("updating", 0), policy.pop("reducing", 0)
    found = step_bytes(
        actor, batch, run.modules(), gradients=policy.get("gradients", 0), reducing=reducing
    )
    estimate = Estimate(
        states={**run.states, "policy": policy},
        updating=updating,
        activations=found.activations,
        passing=found.peak - found.activations,
        growing=found.growing,
        tokens=len(batch.tokens),
        accumulates=any(len(plan.layout) > 1 for plan in plans_ahead(order, run.steps)),
    )
    return Rehearsed(estimate, run.plans["policy"].lighter, run.shapes["policy"])


def largest(order: RunOrder, steps: int) -> PackedBatch:
    """The micro-batch with the most tokens of the first steps, on any rank."""
    sizes = order.examples.lengths
    plans = plans_ahead(order, steps)
    each = (rows for plan in plans for micro in plan.layout for rows in micro)
    return order.packed(max(each, key=lambda rows: sizes[rows].sum()))


def plans_ahead(order: RunOrder, steps: int) -> Iterator[StepPlan]:
    """The first steps of a run."""
    return (order.step(number) for number in range(min(steps, LOOK_AHEAD)))


@frozen
class StepBytes:
    """What a step without values took."""

    activations: int
    """Bytes alive when backward begins."""
    peak: int
    """The most over the survey, the loss and backward, with gradients that wait for their
    reduction."""
    growing: int
    """The most at any time with the gradients of weights so far."""


def step_bytes(
    trainer: Trainer,
    batch: PackedBatch,
    modules: Iterable[torch.nn.Module],
    *,
    gradients: int,
    reducing: int = 0,
) -> StepBytes:
    """Bytes alive in a step on `batch`.

    Gradients of weights are let go at once: they are the backend's, which knows where they are,
    that all of them take `gradients` bytes, and that up to `reducing` bytes of them are whole until
    they are reduced. A survey that sees examples of its own is rehearsed on the loss's.
    """
    weights = [weight for module in modules for weight in module.parameters()]
    trained = [weight for weight in weights if weight.requires_grad]
    whole = sum(weight.numel() for weight in trained)
    done = passed = growing = peak = 0

    def look() -> None:
        nonlocal growing, peak
        lately = counter.lately()
        growing = max(growing, lately + gradients * done // whole)
        peak = max(peak, lately + min(passed, reducing))

    def let_go(weight: Tensor) -> None:
        nonlocal done, passed
        look()
        done += weight.numel()
        passed += weight.nbytes
        weight.grad = None
        counter.lately()  # From here on it is in `done`.

    hooks = [weight.register_post_accumulate_grad_hook(let_go) for weight in trained]
    try:
        with LiveBytes(known=weights) as counter:
            if trainer.needs_survey():
                batch = attrs.evolve(batch, step=_surveyed(trainer, batch))
            loss = trainer.loss(batch)
            total = weighted_loss(loss, {term.per: 1.0 for term in loss.terms})
            activations = counter.live
            total.backward()
            look()
    finally:
        for hook in hooks:
            hook.remove()
    return StepBytes(activations, peak, growing)


def _surveyed(trainer: Trainer, batch: PackedBatch) -> dict[str, Tensor]:
    with torch.no_grad():
        found = dict(trainer.survey(batch))
    own = {"examples": batch.num_examples, "answers": batch.num_answers}
    device = batch.tokens.device
    return found | {n: torch.zeros(k, dtype=torch.long, device=device) for n, k in own.items()}


class RehearsedEngine:
    """A model without values in the place of a live engine."""

    device = META

    def __init__(self, module: PackedModel, *, role: str, stage: int, precision: str) -> None:
        self.module: Any = module
        self.role, self.stage, self.precision = role, stage, precision

    def __call__(self, batch: PackedBatch, readout: Readout) -> Mapping[str, Tensor]:
        """Run the module's forward."""
        return self.module(batch, readout)

    def backward(self, loss: Tensor, *, last: bool) -> None:
        """Add the gradient of `loss`."""
        loss.backward()

    def step(self) -> Any:
        raise AssertionError("a rehearsal takes no step")

    def train(self) -> None:
        """Recomputation on."""
        self.module.train()

    def eval(self) -> None:
        """Recomputation off."""
        self.module.eval()


class Rehearsal(Run):
    """What a trainer's `setup` may use, with models that have shapes and no values."""

    def __init__(
        self, config: Config, tokenizer: Any, mesh: Mesh, hooks: BackendGateway, **options: Any
    ) -> None:
        super().__init__(config, tokenizer, Mesh(device=META), hooks, **options)
        self.device = META
        self.on = mesh
        """The ranks for which the rehearsal speaks."""
        self.states: dict[str, dict[str, int]] = {}
        """What the backend says of each role's bytes."""
        self._attached: dict[str, int | None] = {}

    def load(
        self,
        role: str,
        *,
        model: ModelConfig | None = None,
        trained: bool = True,
        task: Task = "causal",
        dropout: bool = True,
    ) -> Engine:
        """As in a run, without values; nothing is read but the model's configuration."""
        config = self.config
        if model is not None:
            config = attrs.evolve(config, model=model, lora=None)
        module = empty_model(config, task)
        shape = shape_of(module)
        paths, reason = candidates_of(module.causal, self.longest, self.on.device)
        if paths[:1] != ("tree",):
            raise UnknownError(f"{reason}, which is not known without values")
        plan = self.hooks.configure_zero(config=config, mesh=self.on, model_shape=shape)
        if not dropout:
            without_dropout(module)
        module.train(trained)
        if not trained:
            module.requires_grad_(False)
        engine = RehearsedEngine(module, role=role, stage=plan.stage, precision=plan.precision)
        self.engines[role], self.plans[role] = engine, plan
        self.shapes[role], self.tasks[role] = shape, task
        found = self.hooks.estimate_memory(
            config=config, plan=plan, model_shape=shape, mesh=self.on, trained=trained
        )
        self.states[role] = dict(found)
        return engine

    def release(self, role: str) -> None:
        """Give up an engine."""
        for known in (self.engines, self.plans, self.shapes, self.tasks, self.states):
            known.pop(role)

    def cached(
        self,
        name: str,
        folder: Callable[[], Path],
        engine: Callable[[], Engine],
        *,
        read: Any = None,
        width: int | None = None,
    ) -> str:
        """Every example will have such a value; nothing is computed."""
        self._attached[name] = width
        return ""

    def modules(self) -> list[torch.nn.Module]:
        """The models of all roles."""
        return [engine.module for engine in self.engines.values()]

    def without_values(self, batch: PackedBatch) -> PackedBatch:
        """The batch on the meta device, with what a cache would have given it."""
        moved = batch.to(META)
        for name, width in self._attached.items():
            shape = (len(batch.tokens), *(() if width is None else (width,)))
            moved.values[name] = torch.empty(shape, device=META)
        return moved
