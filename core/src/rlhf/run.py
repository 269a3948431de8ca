"""What a trainer's `setup` may use: the configuration, the tokenizer, and models as engines."""

from typing import Any

from torch.optim.lr_scheduler import LRScheduler

from rlhf.config.sections import Config
from rlhf.engine import Engine, Mesh, ModelShape, Plan
from rlhf.gateway import BackendGateway
from rlhf.generate import generate
from rlhf.model.load import load_model, model_shape, parameter_groups


class Run:
    """What a trainer's `setup` may use."""

    def __init__(
        self, config: Config, tokenizer: Any, mesh: Mesh, hooks: BackendGateway, steps: int
    ) -> None:
        self.config = config
        self.tokenizer = tokenizer
        self.device = mesh.device
        self.engines: dict[str, Engine] = {}
        self.plan: Plan
        self.shape: ModelShape
        self.schedule: LRScheduler
        self._mesh, self._hooks, self._steps = mesh, hooks, steps

    def load(self, role: str) -> Engine:
        """The model of the configuration as the trained engine of `role`. Collective."""
        hooks, config = self._hooks, self.config
        self.shape = model_shape(config)
        self.plan = hooks.configure_zero(config=config, mesh=self._mesh, model_shape=self.shape)
        model = load_model(config, plan=self.plan, mesh=self._mesh, hooks=hooks, role=role)
        groups = parameter_groups(model, config.optim.weight_decay)
        optimizer = hooks.build_optimizer(groups=groups, config=config, plan=self.plan)
        self.schedule = hooks.build_schedule(optimizer=optimizer, config=config, steps=self._steps)
        self.engines[role] = hooks.prepare(
            model=model, optimizer=optimizer, schedule=self.schedule, role=role,
            plan=self.plan, mesh=self._mesh,
        )  # fmt: skip
        return self.engines[role]

    def generate(
        self, engine: Engine, prompts: list[list[int]], *, max_new_tokens: int
    ) -> list[list[int]]:
        """Greedy answers to `prompts` (token ids), without the prompt, ended before EOS.
        Collective: every rank calls it, with prompts of its own."""
        return generate(engine, prompts, self._hooks, self.tokenizer, max_new_tokens=max_new_tokens)
