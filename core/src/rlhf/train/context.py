"""The run as a trainer's `setup` sees it: models as engines, references and answers."""

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Literal, TypeVar

import attrs
import numpy as np
from attrs import Factory, define, field
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from rlhf.config.sections import ModelConfig
from rlhf.data.batch import PackedBatch
from rlhf.data.example import Example
from rlhf.data.packing import blank_of, divided
from rlhf.engine import Engine, Plan
from rlhf.errors import RLHFError, listed
from rlhf.launch.clock import Clock
from rlhf.launch.garbage import without_collections
from rlhf.memory.fit import StepFit
from rlhf.model.accelerated import check_packed, compiles, needed_kernels
from rlhf.model.architecture import DTYPES
from rlhf.model.load import load_model
from rlhf.model.packed import PackedModel, recurrent_layers
from rlhf.model.parts import decoder
from rlhf.model.probe import AttentionPath, candidates_of, choose_path
from rlhf.model.role import POLICY, ModelSpec, Role, memory_of, plan_model, trained_share
from rlhf.model.save import check_exportable
from rlhf.model.setting_names import naming_model
from rlhf.model.shape import check_positions, position_table, shape_of
from rlhf.model.task import FORMS, written_class
from rlhf.model.tokenizer import end_tokens
from rlhf.model.trainable import parameter_groups, trained_parts
from rlhf.readouts import token_logprobs
from rlhf.reference.compute import attach_values, read_examples
from rlhf.reference.digest import cache_folder, quick_digests
from rlhf.reference.live import REFERENCE, evaluating
from rlhf.reference.run_models import RunModels
from rlhf.rollouts import RolloutEngine, find_engine, load_engine
from rlhf.sharding import free
from rlhf.train.agreement import check_architecture, check_weights
from rlhf.train.ahead import Ahead
from rlhf.train.checkpointing import check_frozen
from rlhf.train.fragments import check_model
from rlhf.train.offloading import Phases
from rlhf.trainer import Sample

T = TypeVar("T")


@define(kw_only=True, eq=False)
class RunContext(RunModels):
    """The implementation of `rlhf.trainer.Run`."""

    resumed: Path | None = None
    """The checkpoint that the run continues."""
    fit: StepFit | None = None
    startup: Clock = field(factory=lambda: Clock("set-up"))
    _frozen: dict[str, Mapping[str, str]] = field(factory=dict, init=False)
    """For each role with frozen weights, digests of their files by path."""
    phases: Phases = Factory(
        lambda it: Phases(it.roles, it.mesh, it.hooks, it.fit), takes_self=True
    )
    ahead: Ahead = Factory(lambda it: Ahead(partial(it._write, ahead=True)), takes_self=True)

    def frozen_files(self) -> dict[str, str]:
        """Return digests of the files with frozen weights that checkpoints do not have, by path."""
        moving = {follower.engine.role for follower in self.followers} - self.trained.keys()
        sources = [files for role, files in self._frozen.items() if role not in moving]
        return {path: digest for files in sources for path, digest in files.items()}

    @without_collections()
    def _load(self, spec: ModelSpec, empty: PackedModel) -> Engine:
        role, config = spec.role, spec.config
        check_architecture(spec, empty.causal, self.mesh)
        if spec.trained:
            check_exportable(empty.model)
        self.notes += check_positions(empty.causal, self.longest, f"{role} {config.model.path}")
        paths, reason = candidates_of(empty.causal, self.longest, self.device)
        best = paths[0] if paths else "separate"
        recurrent = recurrent_layers(empty.causal)
        check_packed(best, reason, config.model, self.mesh.sequence, recurrent)
        engine = self._add(spec, empty, partial(self._read, spec))
        if not spec.trained or config.lora is not None or config.model.adapter is not None:
            # Checkpoints have the weights of a trained adapter.
            self._note_frozen(role, config.model, adapter=not spec.trained)
        known = probed_alike(self.roles[role], self.roles.values())
        with self.startup.part("probe of attention"):
            attention = choose_path(
                engine, self.mesh, longest=self.longest, known=known, image=spec.image
            )
        check_packed(attention.path, attention.reason, config.model, self.mesh.sequence)
        module = engine.module
        if compiles(config.model) and (kernels := needed_kernels(config.model)):
            # Only now: the probe compares the model's own numbers.
            module.layers = kernels.compile(decoder(module.causal), config.model.fp8)
        self.notes += self._notes_on(spec, module, written_class(empty.causal.config))
        self.roles[role] = attrs.evolve(self.roles[role], attention=attention)
        return engine

    def _read(self, spec: ModelSpec, *, plan: Plan) -> PackedModel:
        module = load_model(spec, plan=plan, mesh=self.mesh, hooks=self.hooks)
        check_weights(spec, module, plan, self.mesh)
        return module

    def _note_frozen(self, role: str, model: ModelConfig, *, adapter: bool = True) -> None:
        """Note the files with frozen weights of a role, which checkpoints do not have. Raises
        RLHFError if they have changed since the checkpoint that the run continues. Collective."""

        def sources() -> Mapping[str, str]:
            found = quick_digests(model, adapter=adapter)
            if self.resumed is not None:
                check_frozen(self.resumed, found)
            return found

        with self.startup.part("loading"), naming_model(self.config, role, model):
            found = self.mesh.on_rank_zero(sources)
            self._frozen[role] = {**self._frozen.get(role, {}), **found}

    def _notes_on(self, spec: ModelSpec, module: PackedModel, written: str) -> Iterator[str]:
        """Yield what the run prints of a loaded model, whose folder has weights of the class
        `written`."""
        model, form = spec.config.model, FORMS[spec.head_task]
        if spec.trains_on_images and spec.trained:
            trained = trained_parts(spec.config)
            frozen = [part for part in ("language", "projector", "vision") if part not in trained]
            rest = f"; frozen: {listed(frozen)}" if frozen else ""
            rates = {part: f" at {rate:g}" for part, rate in spec.config.optim.part_lr.items()}
            named = [part + rates.get(part, "") for part in trained]
            yield f"images     trained: {listed(named)}{rest}"
        if module.layers and spec.trained:
            yield module.layers
        if module.router_loss and spec.trained:
            yield router_note(module, model)
        is_new_head = spec.task != "causal" and not written.endswith(form.suffix)
        if is_new_head and not spec.trained and model != self.config.model:
            yield f"{spec.role:<10} a new head with random values: {model.path} has none"

    def _prepare(self, spec: ModelSpec, module: nn.Module) -> Engine:
        for parameter in module.parameters():
            if parameter.is_floating_point():
                parameter.data = parameter.data.to(DTYPES[spec.config.model.dtype])
        return self._add(spec, module, lambda *, plan: module)

    def _add(self, spec: ModelSpec, empty: nn.Module, read: Callable[..., nn.Module]) -> Engine:
        """Plan a model, `read` it with its weights, and have the backend prepare it. `empty` has
        its parameters, perhaps without values."""
        role, trained = spec.role, spec.trained
        if role in self.roles:
            raise RLHFError(f"setup() loads the role {role!r} twice; each model has its own role")
        if role == POLICY and not trained:
            raise RLHFError("setup() loads the policy with trained=False; choose another role")
        hooks, mesh, shape = self.hooks, self.mesh, shape_of(empty)
        if trained and self.resumed is not None:
            check_model(self.resumed / role, empty)
        with self.startup.part("planning"):
            plan = plan_model(hooks, spec, mesh, shape, others=self.roles.values())
            memory = memory_of(hooks, spec, mesh, shape, plan)
        with self.startup.part("loading"):
            module = read(plan=plan)
        with self.startup.part("engine"):
            hooks.shard(model=module, plan=plan, mesh=mesh)
            optimizer, schedule = (
                self._optimizer_and_schedule(spec, plan, module) if trained else (None, None)
            )
            engine = hooks.prepare(
                model=module, optimizer=optimizer, schedule=schedule, role=role, plan=plan,
                mesh=mesh,
            )  # fmt: skip
        self.roles[role] = Role(
            spec=spec, engine=engine, plan=plan, shape=shape, memory=memory, schedule=schedule
        )
        if trained and role != "policy":
            share = trained_share(shape) or "trained"
            self.notes.append(f"{role:<10} {shape.parameters:,} parameters, {share}")
        return engine

    def _optimizer_and_schedule(
        self, spec: ModelSpec, plan: Plan, module: nn.Module
    ) -> tuple[Optimizer, LRScheduler]:
        """Return the optimizer of a trained model, and the schedule of its learning rate."""
        config, steps = spec.config, max(1, self.steps - spec.first_step)
        groups = parameter_groups(module, config.optim)
        optimizer = self.hooks.build_optimizer(
            groups=groups, config=config, plan=plan, model=module
        )
        self.notes += getattr(optimizer, "notes", ())
        schedule = self.hooks.build_schedule(optimizer=optimizer, config=config, steps=steps)
        return optimizer, schedule

    def release(self, role: str) -> None:
        """Release an engine that is not used again, with the memory of its weights."""
        for parameter in self.roles.pop(role).engine.module.parameters():
            # A backend may hold the module for good, so its weights are released one by one.
            free(parameter)

    @cached_property
    def _writer(self) -> RolloutEngine:
        """What writes answers."""
        return load_engine(find_engine(self.config))(
            config=self.config, tokenizer=self.tokenizer, mesh=self.mesh, hooks=self.hooks
        )

    def sample(
        self,
        engine: Engine,
        prompts: Sequence[Sequence[int]],
        *,
        seeds: Sequence[int],
        max_new_tokens: int,
        temperature: float = 1.0,
        inputs: Sequence[Mapping[str, Any]] = (),
    ) -> list[Sample]:
        """See `rlhf.trainer.Run`."""
        samples = self.ahead.take(seeds)
        if samples is None:
            samples = self._write(
                engine, prompts, seeds=seeds, max_new_tokens=max_new_tokens,
                temperature=temperature, inputs=inputs,
            )()  # fmt: skip
        return samples

    def _write(
        self,
        engine: Engine,
        prompts: Sequence[Sequence[int]],
        *,
        ahead: bool = False,
        temperature: float = 1.0,
        inputs: Sequence[Mapping[str, Any]] = (),
        **how: Any,
    ) -> Callable[[], list[Sample]]:
        """Have answers written, with `ahead` while the run trains if the engine can; the result
        waits for them."""
        if any(map(len, inputs)):
            how["inputs"] = inputs
        elif any(blank_of(part) is not None for part in self.examples):
            raise RLHFError(
                "the data have images, but run.sample() is called without `inputs`; pass "
                "prompt_inputs(example) of each example"
            )
        most = min(self.config.data.max_tokens, position_table(engine.module.causal) or sys.maxsize)
        begin = getattr(self._writer, "begin", None) if ahead else None
        with self.phases("generation", running=engine):
            written: Any = (begin or self._writer.sample)(
                engine, prompts, max_tokens=most, ends=end_tokens(self.tokenizer),
                temperature=temperature, **how,
            )  # fmt: skip
        notes: list[str] = getattr(self._writer, "notes", [])
        self.notes += notes
        notes.clear()
        self.engine_metrics = getattr(self._writer, "metrics", self.engine_metrics)
        return written if begin else lambda: written

    def read(
        self,
        examples: Sequence[Example],
        compute: Callable[[PackedBatch], Tensor],
        *,
        per: Literal["prediction", "answer"] = "prediction",
    ) -> list[list[Any]]:
        """See `rlhf.trainer.Run`."""
        divisions = [divided(example, self.config.batch.budget) for example in examples]
        parts = [part for division in divisions for part in division]
        sizes = [[len(answer.tokens) for answer in part.answers] for part in parts]
        lengths = [len(part.prompt) + sum(size) for part, size in zip(parts, sizes, strict=True)]
        with ExitStack() as stack:
            for role in self.roles.values():
                stack.enter_context(evaluating(role.engine))
            found = read_examples(
                parts, range(len(parts)), np.array(lengths), compute, mesh=self.mesh,
                tokens=self.config.batch.budget, per=per,
            )  # fmt: skip
        of_parts = iter(
            values.tolist() if per == "answer" else np.split(values, np.cumsum(size)[:-1])
            for values, size in zip(found, sizes, strict=True)
        )
        return [[value for _ in division for value in next(of_parts)] for division in divisions]

    def on_rank_zero(self, act: Callable[[], T], *, share: bool = True) -> T:
        """See `rlhf.trainer.Run`."""
        return self.mesh.on_rank_zero(act, share=share)

    def _cache_reference(self, policy: Engine) -> str:
        """Attach the policy's own log-probabilities: before its first step, and before a resume
        loads other weights, it is its own reference."""
        with self.startup.part("cache of reference logprobs"), ExitStack() as stack:
            stack.enter_context(evaluating(policy))

            def make_room() -> Engine:
                stack.enter_context(self.phases("caching", running=policy))
                return policy

            self._note_frozen("reference", self.config.model)
            folder = cache_folder("reference", self.config, self.mesh, tokens=self.tokens)
            return attach_values(
                self, REFERENCE, folder, make_room,
                read=lambda engine, batch: engine(batch, token_logprobs)["logprobs"],
                surveyed=self.surveyed,
            )  # fmt: skip

    def attach(
        self,
        name: str,
        model: ModelConfig,
        compute: Callable[[Engine, PackedBatch], Tensor],
        *,
        key: str,
        width: int | None = None,
    ) -> str:
        """See `rlhf.trainer.Run`."""
        with naming_model(self.config, name, model):
            config = attrs.evolve(self.config, model=model, lora=None)
            folder = cache_folder(name, config, self.mesh, tokens=self.tokens)
            with self.startup.part(f"cache of {name}"):
                done = attach_values(
                    self, name, folder.with_name(f"{folder.name}-{key}"),
                    partial(self.load, name, model=model, trained=False), read=compute, width=width,
                )  # fmt: skip
            self._note_frozen(name, model)
            if name in self.roles:
                self.release(name)
        return done


def probed_alike(role: Role, others: Iterable[Role]) -> AttentionPath | None:
    """Return the path of a loaded model that differs from `role`'s in nothing but its weights."""

    def kind(role: Role) -> list[Any]:
        causal: Any = role.engine.module.causal
        architecture = {**causal.config.to_dict(), "_name_or_path": None}
        model = attrs.evolve(
            role.spec.config.model, path="", revision=None, tokenizer=None, init="random", freeze=()
        )
        plan = [role.plan.sharded, role.plan.precision, role.plan.tensor]
        return [type(causal), architecture, model, role.spec.config.lora, *plan]

    probed = [other for other in others if other.attention is not None]
    return next((other.attention for other in probed if kind(other) == kind(role)), None)


def router_note(module: PackedModel, model: ModelConfig) -> str:
    """Return what the first lines of a run say of the router loss, which is switched off where it
    cannot be computed. Raises RLHFError there for a coefficient that the user has set."""
    if not compiles(model):
        return f"router     load-balancing loss times {module.router_loss:g}, over each example"
    if model.router_loss:
        raise RLHFError(
            "model.router_loss cannot be computed: the layers are compiled; set it to 0"
        )
    module.router_loss = 0.0
    return "router     no load-balancing loss: the layers are compiled"
