"""A step of a run without values: the trainer's own code over models on the meta device.

Tensors there have shapes and no memory, so what a step takes is counted before any weight is read,
for any trainer and any model whose code does not read values.
"""

import os
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from operator import itemgetter
from typing import Any

import attrs
import numpy as np
import torch
from attrs import frozen
from torch import Tensor, nn

from rlhf.config.field_docs import documented
from rlhf.contract.checks import check_setup
from rlhf.data.batch import PackedBatch, map_tensors
from rlhf.data.example import Answer, Example, num_tokens
from rlhf.data.order import RunOrder, SurveyRows
from rlhf.data.packing import (
    PER_TOKEN,
    as_array,
    blank_of,
    divided,
    kind_of,
    pack,
    prompt_inputs,
    with_answers,
)
from rlhf.devices import rehearsing_on
from rlhf.engine import Engine, Layout
from rlhf.errors import RLHFError, first_line
from rlhf.memory.estimate import CountedStep, Estimate, count_step
from rlhf.model import attention
from rlhf.model.architecture import DTYPES
from rlhf.model.packed import BareEngine, PackedModel
from rlhf.model.probe import candidates_of
from rlhf.model.role import (
    ELSEWHERE,
    POLICY,
    ModelSpec,
    Role,
    config_with,
    layouts_of,
    memory_of,
    plan_model,
)
from rlhf.model.shape import shape_of
from rlhf.reference.live import REFERENCE
from rlhf.reference.run_models import RunModels
from rlhf.registry.imports import load_object, load_record
from rlhf.registry.installed import find
from rlhf.trainer import Sample, Trainer

META = torch.device("meta")
DIRECTIONS = np.array([[1, 1, 0.01], [0.01, 1, 1]])
"""Weights of tokens and of images. The model decides those of its memory, so the micro-batches that
are the largest by any of these sums are counted."""
LOOK_AHEAD = 64
"""Number of steps among which the largest micro-batch is searched."""
STRICT = "RLHF_STRICT_REHEARSAL"
"""Environment variable, set by our tests: an unexpected error ends the rehearsal as an error."""


class UnknownError(Exception):
    """What a step takes cannot be computed without values."""


@frozen(kw_only=True)
class Rehearsed:
    """Result of a rehearsal: a step that was counted, for any layout of the trained model."""

    run: "Rehearsal"
    step: CountedStep
    tokens: int
    """Number of tokens of its micro-batch."""
    most: "Largest"

    @property
    def policy(self) -> Role:
        """The trained model."""
        return self.run.roles[POLICY]

    def estimate(self, layout: Layout) -> Estimate:
        """Return what a step takes of each accelerator in a layout of the trained model."""
        states = {name: dict(memory) for name, memory in self.run.memory(layout).items()}
        elsewhere = {name: [parts.pop(name, 0) for parts in states.values()] for name in ELSEWHERE}
        # Models are updated, and their gradients reduced, one after the other.
        updating, reducing = max(elsewhere["updating"]), max(elsewhere["reducing"])
        return Estimate(
            states=states, updating=updating, step=self.step, reducing=reducing,
            tokens=self.tokens, accumulates=self.most.accumulates, host=sum(elsewhere["host"]),
            nvme=sum(elsewhere["nvme"]), images=self.most.images,
        )  # fmt: skip


@documented
@frozen
class NotRehearsed:
    """Why a rehearsal has no result."""

    reason: str
    """In words, for users."""
    traceback: str = ""
    """Of an error in the code of a model or a trainer."""


def rehearse(trainer: Trainer, run: "Rehearsal") -> Rehearsed | NotRehearsed:
    """Return what a step of `trainer` takes on each accelerator of the run, without a collective.

    A model or a trainer may need values, and its setup may raise for a configuration that the run's
    own setup refuses next: then there is only a reason.
    """
    try:
        with rehearsing_on(run.mesh.device.type):
            return _rehearse(trainer, run)
    except UnknownError as error:
        return NotRehearsed(str(error))
    except Exception as error:  # Code of others, over tensors without values.
        if STRICT in os.environ and not isinstance(error, RLHFError):
            raise
        kind = "" if isinstance(error, RLHFError) else f"{type(error).__name__}: "
        return NotRehearsed(f"{kind}{first_line(error)}", traceback.format_exc())


def _rehearse(trainer: Trainer, run: "Rehearsal") -> Rehearsed:
    actor = type(trainer)(trainer.config, trainer.tokenizer)
    with torch.random.fork_rng(devices=[]):
        # Modules of the trainer's own draw values; only rank 0 rehearses.
        actor.setup(run)
    check_setup(actor, run.roles)
    order = run.order(actor)
    most = largest(order, run.steps, made=made_of(actor, order))
    modules = [role.engine.module for role in run.roles.values()]
    reading: Any = nullcontext(run.move)
    if has_images := any(role.spec.image is not None for role in run.roles.values()):
        plugin = find("media", "images")
        reading = load_object(load_record(plugin).values, plugin)()
    with reading as run.move:
        seen = None if most.survey is None else run.without_values(most.survey)

        def count(batch: PackedBatch) -> CountedStep:
            return count_step(actor, run.without_values(batch), modules, surveyed=seen)

        try:
            steps = [(count(batch), batch) for batch in (most.loss, *most.others)]
        except attention.SeesLaterError:
            # The start-up probe will find no better path.
            for module in modules:
                if isinstance(module, PackedModel):
                    module.path = "padded"
                    if module.default_attention == "sdpa":
                        module.causal.set_attn_implementation(attention.NAME)
            steps = [(count(batch), batch) for batch in (most.loss, *most.others)]
        step, batch = max(steps, key=lambda each: max(each[0].peak(), each[0].survey))
        if has_images:
            text = count(attrs.evolve(batch, inputs={}, input_rows={}))
            step = attrs.evolve(step, images=max(0, step.activations - text.activations))
    return Rehearsed(run=run, step=step, tokens=len(batch.tokens), most=most)


@frozen
class Largest:
    """The micro-batches with the most tokens of a run's first steps, on any rank."""

    loss: PackedBatch
    survey: PackedBatch | None
    """None if the survey sees the micro-batches of the loss."""
    accumulates: bool
    """Whether a step may have several micro-batches."""
    others: Sequence[PackedBatch] = ()
    """With images: the micro-batches with most of both, and with the most images."""
    images: int = 0
    """The most bytes of images of a rank's step, all of whose micro-batches are on its device."""


def num_bytes(example: Example) -> int:
    """Return the bytes of the inputs of an example."""
    return sum(as_array(part).nbytes for part in example.inputs.values())


def made_of(trainer: Trainer, order: RunOrder) -> Example | None:
    """Return the largest example that a rollout can make; None without one."""
    if not trainer.needs_rollout():
        return None
    return trainer.rollout_shape(order.examples, order.config.data.max_tokens)


def largest(order: RunOrder, steps: int, *, made: Example | None = None) -> Largest:
    """Return the largest micro-batches of the first steps; those of a rollout hold examples like
    `made`."""
    if made is not None:
        return largest_made(order, made)
    examples = order.examples
    plans = [order.step(number) for number in range(min(steps, LOOK_AHEAD))]
    each = [rows for plan in plans for micro in plan.layout for rows in micro]
    seen = [
        (int(surveyed.lengths[rows].sum()), SurveyRows(plan.epoch, rows))
        for plan in plans if (surveyed := order.surveyed(plan.epoch)) is not None
        for micro in plan.survey_layout for rows in micro
    ]  # fmt: skip
    sizes = np.stack([examples.lengths, examples.input_bytes], axis=1)
    sums = np.array([sizes[rows].sum(0) for rows in each])
    if (blank := blank_of(examples)) is not None:
        size = num_tokens(blank), num_bytes(blank)
        sums[sums[:, 1] < size[1]] += size
    shares = sums / sums.max(0).clip(1)
    most, *others = dict.fromkeys((shares @ DIRECTIONS).argmax(0).tolist())
    starts = np.cumsum([0, *(len(plan.layout) for plan in plans)])[:-1]
    of_steps = np.add.reduceat(sums[:, 1].reshape(-1, order.ranks), starts)
    return Largest(
        loss=order[each[most]],
        others=[order[each[number]] for number in others],
        images=(1 + bool(seen)) * int(of_steps.max()),
        survey=order[max(seen, key=itemgetter(0))[1]] if seen else None,
        accumulates=any(len(plan.layout) > 1 for plan in plans),
    )


def largest_made(order: RunOrder, made: Example) -> Largest:
    """Return as many examples like `made` as a rank has in a step, or as fill the budget. With
    images there are others: with the images of the prompt that brings most of them; with answers of
    a token, so that more images fit; and of text with the blank, if some prompts have no images."""
    examples, budget = order.examples, order.config.batch.budget
    parts = divided(made, budget)
    own = -(-order.config.batch.size * len(parts) // order.ranks)
    made, size = max(parts, key=num_tokens), 0
    batches = [filled(order, made, own)]
    if (blank := blank_of(examples)) is not None:
        fitting = (budget // (examples.prompt_lengths + len(made.answers))).clip(1, own)
        place = int((fitting * examples.input_bytes).argmax())
        size = own * int(examples.input_bytes[place])
        tree = with_answers(examples[place], made.answers, made.values)
        whole = with_text(tree, len(made.prompt) - len(tree.prompt))
        batches = [filled(order, each, own) for each in (whole, with_short_answers(tree))]
        if examples.input_bytes.min() < num_bytes(blank):
            none = {name: value[:0] for name, value in prompt_inputs(blank).items()}
            text = with_answers(Example([], [], inputs=none), made.answers, made.values)
            batches.append(filled(order, with_text(text, len(made.prompt)), own, blank))
    accumulates = own > batches[0].num_examples
    return Largest(
        loss=batches[0], others=batches[1:], survey=None, accumulates=accumulates, images=size
    )


def filled(order: RunOrder, tree: Example, own: int, blank: Example | None = None) -> PackedBatch:
    """Return as many examples like `tree` as fit into the budget, up to `own`. If there are more,
    text fills what they leave, as smaller examples would."""
    budget = order.config.batch.budget
    fitting = max(1, min(own, budget // num_tokens(tree)))
    examples = [tree] * fitting
    if fitting < own:
        examples[0] = with_text(tree, budget - fitting * num_tokens(tree))
    examples += [] if blank is None else [blank]
    return pack(examples, range(fitting), round_to=order.round_to, at_most=budget)


def with_text(example: Example, length: int) -> Example:
    """Return an example whose prompt has so many more tokens of text."""
    more, answers = [0] * length, (len(answer.tokens) for answer in example.answers)
    inputs = prompt_inputs(example, len(more), *answers)
    return attrs.evolve(example, prompt=[*example.prompt, *more], inputs=inputs)


def with_short_answers(example: Example) -> Example:
    """Return an example with the first token of each answer."""
    values = {
        name: [row[:1] for row in value] if kind_of(value) == PER_TOKEN else value
        for name, value in example.values.items()
    }
    return with_answers(example, [Answer([0]) for _ in example.answers], values)


def on_meta(module: nn.Module, dtype: torch.dtype) -> nn.Module:
    """Move a module to the meta device. torch gives each name of a tied weight a parameter of its
    own there; they are tied again."""
    names: dict[nn.Parameter, list[str]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        names.setdefault(parameter, []).append(name)
    module = module.to(META, dtype)
    for first, *others in names.values():
        for name in others:
            owner, _, leaf = name.rpartition(".")
            setattr(module.get_submodule(owner), leaf, module.get_parameter(first))
    return module


@attrs.define(kw_only=True, eq=False)
class Rehearsal(RunModels):
    """An `rlhf.trainer.Run` whose models have shapes and no values. `mesh` has the ranks of the run
    that is rehearsed."""

    device: torch.device = META
    move: Callable[[Tensor], Tensor] = lambda tensor: tensor.to(META)
    """Moves a tensor of a batch to the meta device."""
    _attached: dict[str, int | None] = attrs.field(factory=dict)
    """Width of the per-token values that a cache would add to the examples."""

    def _load(self, spec: ModelSpec, empty: PackedModel) -> Engine:
        paths, reason = candidates_of(empty.causal, self.longest, self.mesh.device)
        if paths[:1] != ("tree",):
            raise UnknownError(f"{reason}, which is not known without values")
        return self._add(spec, empty)

    def _prepare(self, spec: ModelSpec, module: nn.Module) -> Engine:
        return self._add(spec, on_meta(module, DTYPES[self.config.model.dtype]))

    def _add(self, spec: ModelSpec, module: nn.Module) -> Engine:
        shape = shape_of(module)
        if spec.role == POLICY:
            layouts = layouts_of(self.hooks, spec.config, self.mesh, shape)
            plan = next(layout.plan for layout in layouts if layout.configured)
        else:
            plan = plan_model(self.hooks, spec, self.mesh, shape, others=())
        module.train(spec.trained)
        if not spec.trained:
            module.requires_grad_(False)
        engine = BareEngine(
            module=module,
            device=META,
            precision=plan.precision,
            role=spec.role,
            sharded=plan.sharded,
        )
        self.roles[spec.role] = Role(spec=spec, engine=engine, plan=plan, shape=shape, memory={})
        return engine

    def memory(self, layout: Layout) -> dict[str, Mapping[str, int]]:
        """Return the bytes of each role in a layout of the trained one, by the backend."""
        planned: dict[str, Role] = {}
        for name, role in self.roles.items():
            config = config_with(layout.config, role.spec.model, role.spec.optim)
            config = attrs.evolve(config, lora=role.spec.config.lora)
            spec = attrs.evolve(role.spec, config=config)
            plan = layout.plan
            if name != POLICY:
                plan = plan_model(self.hooks, spec, self.mesh, role.shape, planned.values())
            memory = memory_of(self.hooks, spec, self.mesh, role.shape, plan)
            planned[name] = attrs.evolve(role, memory=memory)
        return {name: role.memory for name, role in planned.items()}

    def _cache_reference(self, policy: Engine) -> str:
        self._attached[REFERENCE] = None
        return ""

    def attach(self, name: str, *_: Any, width: int | None = None, **options: Any) -> str:
        self._attached[name] = width
        return ""

    def sample(self, *arguments: Any, **options: Any) -> list[Sample]:
        raise UnknownError("its setup samples answers, which are not known without values")

    def read(self, *arguments: Any, **options: Any) -> list[list[Any]]:
        raise UnknownError("its setup reads examples, which is not possible without values")

    def on_rank_zero(self, act: Callable[[], Any], *, share: bool = True) -> Any:
        return None

    def without_values(self, batch: PackedBatch) -> PackedBatch:
        """Return the batch on the meta device, with the values that a cache would add."""
        moved = map_tensors(batch, self.move)
        for name, width in self._attached.items():
            shape = (len(batch.tokens), *(() if width is None else (width,)))
            moved.values[name] = torch.empty(shape, device=META)
        return moved
