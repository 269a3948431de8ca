"""What a trainer's `setup` may use: the configuration, the tokenizer, and models as engines."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import attrs
from torch import Tensor
from torch.optim.lr_scheduler import LRScheduler

from rlhf.config.sections import Config, ModelConfig
from rlhf.data.batch import PackedBatch
from rlhf.data.examples import Examples
from rlhf.engine import Engine, Mesh, ModelShape, Plan, free
from rlhf.model.dropout import without_dropout
from rlhf.model.kernels.compiled import check_packed, compile_layers, compiles
from rlhf.model.load import load_model
from rlhf.model.parameter_groups import parameter_groups
from rlhf.model.parts import decoder
from rlhf.model.positions import check_positions
from rlhf.model.probe import AttentionPath, candidates_of, choose_path
from rlhf.model.shape import empty_model, shape_of
from rlhf.model.task import Task
from rlhf.reference.live import Follower, Reference, ReferenceMode, make_reference
from rlhf.reference.table import own_logprobs, with_logprobs
from rlhf.registry.gateway import BackendGateway
from rlhf.run.generate import sample


class Run:
    """What a trainer's `setup` may use."""

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
    ) -> None:
        self.config = config
        self.tokenizer = tokenizer
        self.device = mesh.device
        self.engines: dict[str, Engine] = {}
        """Every loaded engine by its role."""
        self.plans: dict[str, Plan] = {}
        self.shapes: dict[str, ModelShape] = {}
        self.tasks: dict[str, Task] = {}
        """What stands on each engine's backbone."""
        self.attention: dict[str, AttentionPath] = {}
        """How each engine runs packed batches."""
        self.notes: list[str] = []
        """Lines for the run's introduction: what was chosen on the way, and why."""
        self.followers: list[Follower] = []
        """Frozen engines that move: told of every step, saved and restored with the run."""
        self.examples = tuple(examples)
        """The tokenised rows, those to train on first, held-out ones after them."""
        self.schedule: LRScheduler
        self.mesh, self.hooks, self.steps, self.longest = mesh, hooks, steps, longest
        """For core itself; a trainer needs none of them."""

    def load(
        self,
        role: str,
        *,
        model: ModelConfig | None = None,
        trained: bool = True,
        task: Task = "causal",
        dropout: bool = True,
    ) -> Engine:
        """An engine for `role`. Collective.

        Without `model` it is the configuration's own, with its adapters; another (a teacher, say)
        comes as it is. Only one engine is trained, `policy`; the others run without gradient under
        a plan of their own. `dropout` False takes the model's own out.
        """
        assert trained == (role == "policy"), role
        hooks, config = self.hooks, self.config
        if model is not None:
            config = attrs.evolve(config, model=model, lora=None)
        empty = empty_model(config, task)
        self.notes += check_positions(empty.causal, self.longest, f"{role} {config.model.path}")
        paths, reason = candidates_of(empty.causal, self.longest, self.device)
        check_packed(config.model, paths[0] if paths else "separate", reason)
        shape = shape_of(empty)
        plan = hooks.configure_zero(config=config, mesh=self.mesh, model_shape=shape)
        module = load_model(config, plan=plan, mesh=self.mesh, hooks=hooks, role=role, task=task)
        if not dropout:
            without_dropout(module)
        optimizer = schedule = None
        if trained:
            groups = parameter_groups(module, config.optim.weight_decay)
            optimizer = hooks.build_optimizer(groups=groups, config=config, plan=plan)
            schedule = hooks.build_schedule(optimizer=optimizer, config=config, steps=self.steps)
            self.schedule = schedule
        engine = hooks.prepare(
            model=module, optimizer=optimizer, schedule=schedule, role=role,
            plan=plan, mesh=self.mesh,
        )  # fmt: skip
        self.engines[role], self.plans[role], self.shapes[role] = engine, plan, shape
        self.tasks[role] = task
        self.attention[role] = choose_path(engine, self.mesh, longest=self.longest)
        if compiles(config.model):
            # Only now: the probe compares the model's own numbers.
            found = self.attention[role]
            check_packed(config.model, found.path, found.reason)
            module.layers = compile_layers(decoder(module.causal), config.model.fp8)
        if module.layers and trained:
            self.notes.append(module.layers)
        return engine

    def release(self, role: str) -> None:
        """Give up an engine that was loaded for a while, with the memory of its weights."""
        engine = self.engines.pop(role)
        for known in (self.plans, self.shapes, self.tasks, self.attention):
            known.pop(role)
        for parameter in engine.module.parameters():
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
        """The policy as it is before its first step, without gradient; call it after
        `load("policy")`. Collective. Raises RLHFError for a mode that this run cannot have.

        With `every` it moves after so many steps, each time to the share `mix` of the policy
        (TR-DPO). `live` says that it will be asked about other tokens than those of the data, which
        no cache can answer.
        """
        return make_reference(self, mode, every=every, mix=mix, live=live)

    def cached(
        self,
        name: str,
        folder: Callable[[], Path],
        engine: Callable[[], Engine],
        *,
        read: Callable[[Engine, PackedBatch], Tensor] = own_logprobs,
        width: int | None = None,
    ) -> str:
        """Give every example the value `name` per token (or `width` of them), in `batch.values`:
        what `read(engine, batch)` gives of each prediction, [N] or [N, width].

        It is kept in `folder()`; `engine` loads what computes the part that is not there. What was
        done, in words. Collective.
        """
        self.examples, done = with_logprobs(
            self.examples, name, folder(), self.mesh, engine=engine,
            tokens=self.config.batch.budget, read=read, width=width,
        )  # fmt: skip
        return done

    def sample(
        self,
        engine: Engine,
        prompts: Sequence[Sequence[int]],
        *,
        seeds: Sequence[int],
        max_new_tokens: int,
        temperature: float = 1.0,
    ) -> list[list[int]]:
        """Answers drawn from the engine's own distribution at `temperature`, one for each prompt
        (token ids), with EOS where they reached it. But for rounding an answer depends on its
        prompt and its seed alone. Collective: every rank gives the same prompts and gets all
        answers."""
        return sample(
            engine, prompts, self.hooks, self.mesh, self.tokenizer, seeds=seeds,
            max_new_tokens=max_new_tokens, temperature=temperature,
            tokens=self.config.batch.budget,
        )  # fmt: skip
