"""The part of `rlhf.trainer.Run` that a run and its rehearsal share."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from attrs import Factory, define, field
from torch import Tensor, nn

from rlhf.config.reference_modes import ReferenceMode
from rlhf.config.sections import Config, ModelConfig, OptimConfig
from rlhf.config.source_names import check_model_folder
from rlhf.data.examples import Examples, Packable
from rlhf.data.order import RunOrder, rounding_on, survey_draw
from rlhf.engine import Engine, Mesh, ModelShape
from rlhf.errors import RLHFError
from rlhf.model.architecture import read_architecture
from rlhf.model.extra import first_values, notes_on_extra
from rlhf.model.packed import PackedModel
from rlhf.model.role import POLICY, ModelSpec, Role, config_with
from rlhf.model.setting_names import name_in_errors, naming_model
from rlhf.model.shape import empty_model
from rlhf.model.task import Task
from rlhf.model.tokenizer import read_tokenizer
from rlhf.reference.live import CachedReference, EngineReference, Follower, choose_mode
from rlhf.reference.surveyed import SurveyedExamples
from rlhf.registry.gateway import BackendGateway
from rlhf.trainer import Reference, Trainer


@define(kw_only=True, eq=False)
class RunModels(ABC):
    """The models of a run by role, with its references.

    A subclass says how a model becomes an engine and how the examples get values per token.
    """

    config: Config
    tokenizer: Any
    mesh: Mesh
    hooks: BackendGateway
    steps: int
    longest: int
    """Tokens of the longest path."""
    examples: tuple[Examples, ...] = ()
    surveyed: tuple[SurveyedExamples, ...] = ()
    """What the survey sees of each of `examples` in every epoch, if the reference is cached."""
    device: torch.device = Factory(lambda self: self.mesh.device, takes_self=True)
    tokens: int | None = None
    """Number of tokens that every language model of the run predicts, the first of its head; None
    for all."""
    roles: dict[str, Role] = field(factory=dict)
    """The loaded models by role."""
    notes: list[str] = field(factory=list)
    """See `rlhf.trainer.Run`."""
    followers: list[Follower] = field(factory=list)
    """Frozen engines that move; they are saved and restored with the run."""

    @property
    def trained(self) -> dict[str, Role]:
        """The trained models by role, the policy among them."""
        return {name: role for name, role in self.roles.items() if role.spec.trained}

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
        with naming_model(self.config, role, model):
            if model is not None:
                check_model_folder(model.path, name_in_errors(self.config, model, "path"))
            if trained:
                self.notes += notes_on_extra(config, extra or {})
            spec = ModelSpec(
                role=role, config=config, trained=trained, model=model, optim=optim, task=task,
                labels=labels, extra=first_values(config, extra or {}), dropout=dropout,
            )  # fmt: skip
            engine = self._load(spec, empty_model(spec, self.mesh))
        self._limit_tokens()
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
        config = config_with(self.config, None, optim)
        spec = ModelSpec(role=role, config=config, trained=trained, optim=optim)
        return self._prepare(spec, module)

    def reference(
        self,
        mode: ReferenceMode = "auto",
        *,
        every: int | None = None,
        mix: float = 1.0,
        live: bool = False,
        survey: Callable[[Examples, np.random.Generator], Packable] | None = None,
    ) -> Reference:
        """See `rlhf.trainer.Run`."""
        num_rows = len(self.examples[0]) if self.examples else 0
        chosen, reason = choose_mode(
            self.config, mode, num_rows=num_rows, steps=self.steps, every=every, live=live
        )
        note = f"reference  {chosen}: {reason}"
        if POLICY not in self.roles:
            raise RLHFError("setup() calls run.reference() before run.load('policy'); swap them")
        policy, spec = self.roles[POLICY].engine, self.roles[POLICY].spec
        if spec.task is None:
            raise RLHFError(
                "run.reference() needs a policy that run.load() has loaded; prepare a second "
                "module as the reference with run.prepare(module, 'reference', trained=False)"
            )
        if chosen == "cache":
            if survey is not None:
                seed = self.config.train.seed
                drawn = [survey(part, survey_draw(seed, 0)) for part in self.examples]
                self.surveyed = tuple(SurveyedExamples(each) for each in drawn)
            self.notes.append(f"{note}; {self._cache_reference(policy)}")
            return CachedReference()
        self.notes.append(note)
        if chosen == "adapter":
            extra = {name: value.to(policy.device) for name, value in spec.extra.items()}
            return EngineReference(engine=policy, mode="adapter", extra=extra)
        engine = self.load(
            "reference", model=self.config.model, trained=False, task=spec.task,
            labels=spec.labels, extra=spec.extra, dropout=False,
        )  # fmt: skip
        if every is not None:
            self.followers.append(
                Follower(engine=engine, source=policy, every=every, mix=mix, hooks=self.hooks)
            )
        return EngineReference(engine=engine, mode="engine")

    def shape(self, role: str) -> ModelShape:
        """See `rlhf.trainer.Run`."""
        return self.roles[role].shape

    def load_architecture(self, role: str = POLICY, *, model: ModelConfig | None = None) -> Any:
        """See `rlhf.trainer.Run`."""
        with naming_model(self.config, role, model):
            if model is not None:
                check_model_folder(model.path, name_in_errors(self.config, model, "path"))
            return read_architecture(config_with(self.config, model, None))

    def load_tokenizer(self, model: ModelConfig) -> Any:
        """See `rlhf.trainer.Run`."""
        with naming_model(self.config, "tokenizer", model):
            return read_tokenizer(model)

    def limit_tokens(self, tokens: int) -> None:
        """See `rlhf.trainer.Run`."""
        self.tokens = min(tokens, self.tokens or tokens)
        self._limit_tokens()

    def _limit_tokens(self) -> None:
        """Have every language model that is loaded predict only the run's tokens."""
        for role in self.roles.values():
            if role.spec.task == "causal":
                role.engine.module.tokens = self.tokens

    def order(self, trainer: Trainer, part: int = 0) -> RunOrder:
        """Return the order of the training rows, or with `part` 1 that of the held-out ones."""
        ranks, round_to = self.mesh.data, rounding_on(self.mesh.device)
        surveys = trainer.needs_survey() and not trainer.needs_rollout()
        return RunOrder(
            examples=self.examples[part], config=self.config, shuffle=not part,
            draw_survey=trainer.survey_examples if surveys else None,
            rank=ranks.rank, ranks=ranks.size, round_to=round_to,
            fixed_survey=self.surveyed[part] if self.surveyed else None,
        )  # fmt: skip

    @abstractmethod
    def _load(self, spec: ModelSpec, empty: PackedModel) -> Engine:
        """Add the role of a transformers model. `empty` is the model without values."""

    @abstractmethod
    def _prepare(self, spec: ModelSpec, module: nn.Module) -> Engine:
        """Add the role of a module of the trainer's own."""

    @abstractmethod
    def _cache_reference(self, policy: Engine) -> str:
        """Attach the policy's log-probabilities to the examples; return what was done, in words."""
