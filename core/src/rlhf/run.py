"""What a trainer's `setup` may use: the configuration, the tokenizer, and models as engines."""

from typing import Any

import attrs
from torch.optim.lr_scheduler import LRScheduler

from rlhf.config.sections import Config, ModelConfig
from rlhf.engine import Engine, Mesh, ModelShape, Plan
from rlhf.gateway import BackendGateway
from rlhf.generate import generate
from rlhf.model.load import Task, load_model, model_shape, parameter_groups
from rlhf.model.probe import AttentionPath, choose_path


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
    ) -> None:
        self.config = config
        self.tokenizer = tokenizer
        self.device = mesh.device
        self.engines: dict[str, Engine] = {}
        """Every loaded engine by its role."""
        self.plans: dict[str, Plan] = {}
        self.shapes: dict[str, ModelShape] = {}
        self.attention: dict[str, AttentionPath] = {}
        """How each engine runs packed batches."""
        self.schedule: LRScheduler
        self._mesh, self._hooks, self._steps, self._longest = mesh, hooks, steps, longest

    def load(
        self,
        role: str,
        *,
        model: ModelConfig | None = None,
        trained: bool = True,
        task: Task = "causal",
    ) -> Engine:
        """An engine for `role`. Collective.

        Without `model` it is the configuration's own, with its adapters; another (a teacher, say)
        comes as it is. Only one engine is trained, `policy`; the others run without gradient under
        a plan of their own.
        """
        assert trained == (role == "policy"), role
        hooks, config = self._hooks, self.config
        if model is not None:
            config = attrs.evolve(config, model=model, lora=None)
        shape = model_shape(config, task=task)
        plan = hooks.configure_zero(config=config, mesh=self._mesh, model_shape=shape)
        module = load_model(config, plan=plan, mesh=self._mesh, hooks=hooks, role=role, task=task)
        optimizer = schedule = None
        if trained:
            groups = parameter_groups(module, config.optim.weight_decay)
            optimizer = hooks.build_optimizer(groups=groups, config=config, plan=plan)
            schedule = hooks.build_schedule(optimizer=optimizer, config=config, steps=self._steps)
            self.schedule = schedule
        engine = hooks.prepare(
            model=module, optimizer=optimizer, schedule=schedule, role=role,
            plan=plan, mesh=self._mesh,
        )  # fmt: skip
        self.engines[role], self.plans[role], self.shapes[role] = engine, plan, shape
        self.attention[role] = choose_path(engine, self._mesh, longest=self._longest)
        return engine

    def generate(
        self, engine: Engine, prompts: list[list[int]], *, max_new_tokens: int
    ) -> list[list[int]]:
        """Greedy answers to `prompts` (token ids), without the prompt, ended before EOS.
        Collective: every rank calls it, with prompts of its own."""
        return generate(engine, prompts, self._hooks, self.tokenizer, max_new_tokens=max_new_tokens)
