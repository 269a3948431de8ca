"""The run as a trainer's `setup` sees it: models as engines, references, teachers and answers."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import attrs
from torch import Tensor, nn

from rlhf.config.reference_modes import ReferenceMode
from rlhf.config.sections import Config, ModelConfig, OptimConfig
from rlhf.data.batch import PackedBatch
from rlhf.data.examples import Examples
from rlhf.engine import Engine, Mesh, ModelShape, Plan, free
from rlhf.errors import RLHFError
from rlhf.loop.fragments import check_model
from rlhf.memory.fit import StepFit
from rlhf.model.dropout import without_dropout
from rlhf.model.extra import first_values
from rlhf.model.kernels.layers import check_packed, compile_layers, compiles
from rlhf.model.load import load_model
from rlhf.model.parts import decoder
from rlhf.model.probe import AttentionPath, candidates_of, choose_path
from rlhf.model.role import POLICY, Role, config_with, plan_model
from rlhf.model.shape import check_positions, empty_model, shape_of, shape_of_module
from rlhf.model.task import Task
from rlhf.model.trainable import parameter_groups
from rlhf.rank.generate import sample
from rlhf.rank.phases import Phases
from rlhf.readouts.teachers import TOP_TOKENS
from rlhf.reference.compute import own_logprobs, with_logprobs
from rlhf.reference.digest import cache_folder
from rlhf.reference.live import (
    REFERENCE,
    CachedReference,
    EngineReference,
    Follower,
    choose_mode,
    evaluating,
)
from rlhf.reference.teacher import TEACHER, check_teacher, teacher_folder, top_tokens
from rlhf.registry.gateway import BackendGateway
from rlhf.trainer import Reference, Sample


class RunContext:
    """The implementation of `rlhf.trainer.Run`."""

    def __init__(
        self,
        config: Config,
        tokenizer: Any,
        mesh: Mesh,
        hooks: BackendGateway,
        *,
        steps: int,
        longest: int,
        examples: Sequence[Examples] = (),
        resumed: Path | None = None,
        fit: StepFit | None = None,
    ) -> None:
        self.config = config
        self.tokenizer = tokenizer
        self.device = mesh.device
        self.steps = steps
        self.examples = tuple(examples)
        self.mesh = mesh
        self.hooks = hooks
        self.longest = longest
        """Tokens of the longest path."""
        self.resumed = resumed
        """The checkpoint that the run continues."""
        self.roles: dict[str, Role] = {}
        """The loaded models by role."""
        self.phases = Phases(self.roles, mesh, hooks, fit)
        self.notes: list[str] = []
        """Lines for the run's introduction: what was chosen, and why."""
        self.followers: list[Follower] = []
        """Frozen engines that move; they are saved and restored with the run."""

    def load(
        self,
        role: str,
        *,
        model: ModelConfig | None = None,
        trained: bool = True,
        task: Task = "causal",
        labels: int | None = None,
        extra: Mapping[str, Tensor] | None = None,
        dropout: bool = True,
        optim: OptimConfig | None = None,
    ) -> Engine:
        """See `rlhf.trainer.Run`."""
        config = config_with(self.config, model, optim)
        extra = first_values(config, extra or {})
        empty = empty_model(config, task, labels=labels, extra=extra)
        name = f"{role} {config.model.path}"
        self.notes += check_positions(empty.causal, self.longest, name)
        paths, reason = candidates_of(empty.causal, self.longest, self.device)
        check_packed(config.model, paths[0] if paths else "separate", reason)

        def read(plan: Plan) -> nn.Module:
            module = load_model(
                config, plan=plan, mesh=self.mesh, hooks=self.hooks, role=role, task=task,
                labels=labels, extra=extra,
            )  # fmt: skip
            if not dropout:
                without_dropout(module)
            return module

        engine = self._add(role, config, empty, shape_of(empty), read, trained=trained)
        attention = choose_path(engine, self.mesh, longest=self.longest)
        if compiles(config.model):
            # Only now: the probe compares the model's own numbers.
            _compile(engine, config.model, attention)
        if engine.module.layers and trained:
            self.notes.append(engine.module.layers)
        self.roles[role] = attrs.evolve(
            self.roles[role], model=model, task=task, labels=labels, extra=extra,
            attention=attention,
        )  # fmt: skip
        return engine

    def prepare(
        self,
        module: nn.Module,
        role: str,
        *,
        trained: bool = True,
        optim: OptimConfig | None = None,
    ) -> Engine:
        """See `rlhf.trainer.Run`."""
        shape = shape_of_module(module)
        config = config_with(self.config, None, optim)
        return self._add(role, config, module, shape, lambda plan: module, trained=trained)

    def _add(
        self,
        role: str,
        config: Config,
        empty: nn.Module,
        shape: ModelShape,
        read: Callable[[Plan], nn.Module],
        *,
        trained: bool,
    ) -> Engine:
        """Plan a model, `read` it with its weights, and have the backend prepare it. `empty` has
        its parameters, perhaps without values."""
        if role in self.roles:
            raise RLHFError(f"setup() loads the role {role!r} twice; each model has its own role")
        if role == POLICY and not trained:
            raise RLHFError("setup() loads the policy with trained=False; choose another role")
        hooks, mesh = self.hooks, self.mesh
        if trained and self.resumed is not None:
            check_model(self.resumed / role, empty)
        plan, memory = plan_model(
            hooks, config, mesh, shape, role, trained=trained, others=self.roles.values()
        )
        module = read(plan)
        optimizer = schedule = None
        if trained:
            groups = parameter_groups(module, config.optim.weight_decay)
            optimizer = hooks.build_optimizer(groups=groups, config=config, plan=plan)
            schedule = hooks.build_schedule(optimizer=optimizer, config=config, steps=self.steps)
        engine = hooks.prepare(
            model=module, optimizer=optimizer, schedule=schedule, role=role, plan=plan, mesh=mesh
        )
        self.roles[role] = Role(
            engine=engine, plan=plan, shape=shape, memory=memory, trained=trained,
            schedule=schedule,
        )  # fmt: skip
        if trained and role != "policy":
            self.notes.append(f"{role:<10} {shape.parameters:,} parameters, trained")
        return engine

    def release(self, role: str) -> None:
        """Release an engine that is not used again, with the memory of its weights."""
        for parameter in self.roles.pop(role).engine.module.parameters():
            # A backend may hold the module for good, so its weights are released one by one.
            free(parameter)

    def reference(
        self,
        mode: ReferenceMode = "auto",
        *,
        every: int | None = None,
        mix: float = 1.0,
        live: bool = False,
    ) -> Reference:
        """See `rlhf.trainer.Run`."""
        chosen, reason = choose_mode(
            self.config, mode, num_rows=self._num_rows, steps=self.steps, every=every, live=live
        )
        note = f"reference  {chosen}: {reason}"
        if POLICY not in self.roles:
            raise RLHFError("setup() calls run.reference() before run.load('policy'); swap them")
        loaded = self.roles[POLICY]
        policy = loaded.engine
        if loaded.task is None:
            raise RLHFError(
                "run.reference() is of a policy from run.load(); prepare a second module as the "
                "reference with run.prepare(module, 'reference', trained=False)"
            )
        if chosen == "cache":
            self.notes.append(f"{note}; {self._cache_reference(policy)}")
            return CachedReference()
        self.notes.append(note)
        if chosen == "adapter":
            return EngineReference(policy, mode="adapter", extra=loaded.extra)
        engine = self.load(
            "reference", model=self.config.model, trained=False, task=loaded.task,
            labels=loaded.labels, extra=loaded.extra, dropout=False,
        )  # fmt: skip
        if every is not None:
            self.followers.append(
                Follower(engine=engine, source=policy, every=every, mix=mix, hooks=self.hooks)
            )
        return EngineReference(engine, mode="engine")

    def teacher(
        self, model: ModelConfig, *, top: int | None = None, temperature: float = 1.0
    ) -> Engine | None:
        """See `rlhf.trainer.Run`."""
        check_teacher(self.config, model, self.tokenizer, top=top)
        load = partial(self.load, TEACHER, model=model, trained=False)
        if top is None:
            engine = load()
            size = self.roles[TEACHER].shape.parameters
            self.notes.append(f"teacher    {model.path}: {size:,} parameters, frozen")
            return engine
        done = self._attach(
            TOP_TOKENS,
            teacher_folder(self.config, model, self.mesh, top=top, temperature=temperature),
            load,
            read=partial(top_tokens, top=top, temperature=temperature),
            width=2 * top + 1,
        )
        if TEACHER in self.roles:
            self.release(TEACHER)
        self.notes.append(f"teacher    its {top} most likely tokens: {done}")
        return None

    def sample(
        self,
        engine: Engine,
        prompts: Sequence[Sequence[int]],
        *,
        seeds: Sequence[int],
        max_new_tokens: int,
        temperature: float = 1.0,
    ) -> list[Sample]:
        """See `rlhf.trainer.Run`."""
        with self.phases("generation", running=engine):
            return sample(
                engine, prompts, self.hooks, self.mesh, self.tokenizer, seeds=seeds,
                max_new_tokens=max_new_tokens, temperature=temperature,
                tokens=self.config.batch.budget,
            )  # fmt: skip

    @property
    def _num_rows(self) -> int:
        return len(self.examples[0]) if self.examples else 0

    def _cache_reference(self, policy: Engine) -> str:
        """Attach the policy's own log-probabilities: before its first step, and before a resume
        loads other weights, it is its own reference."""
        with evaluating(policy), ExitStack() as stack:

            def make_room() -> Engine:
                stack.enter_context(self.phases("caching", running=policy))
                return policy

            folder = cache_folder("reference", self.config, self.mesh)
            return self._attach(REFERENCE, folder, make_room, read=own_logprobs)

    def _attach(
        self,
        name: str,
        folder: Path,
        engine: Callable[[], Engine],
        *,
        read: Callable[[Engine, PackedBatch], Tensor],
        width: int | None = None,
    ) -> str:
        """Give every example the value `name` per token (or `width` of them), from `folder`; what
        is missing there is computed with `read` on the engine that `engine` loads. Returns what was
        done, in words. Collective."""
        self.examples, done = with_logprobs(
            self.examples, name, folder, self.mesh, engine=engine,
            tokens=self.config.batch.budget, read=read, width=width,
        )  # fmt: skip
        return done


def _compile(engine: Engine, model: ModelConfig, attention: AttentionPath) -> None:
    check_packed(model, attention.path, attention.reason)
    module = engine.module
    module.layers = compile_layers(decoder(module.causal), model.fp8)
