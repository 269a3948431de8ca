"""The part of `rlhf.trainer.Run` that a run and its rehearsal share."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import torch
from attrs import Factory, define, field
from torch import Tensor, nn

from rlhf.config.reference_modes import ReferenceMode
from rlhf.config.sections import Config, ModelConfig, OptimConfig
from rlhf.config.source_names import check_model_folder
from rlhf.data.examples import Examples, Packable
from rlhf.data.order import RunOrder, rounding_on, survey_draw
from rlhf.data.packing import blank_of
from rlhf.engine import Engine, Mesh, ModelShape
from rlhf.errors import RLHFError
from rlhf.model.architecture import read_architecture
from rlhf.model.extra import EXTRA_PREFIX, first_values, notes_on_extra
from rlhf.model.packed import PackedModel
from rlhf.model.role import POLICY, ModelSpec, Role, config_with
from rlhf.model.setting_names import name_in_errors, naming_model
from rlhf.model.shape import empty_model
from rlhf.model.task import Task, reads_images
from rlhf.model.tokenizer import read_tokenizer
from rlhf.reference.live import CachedReference, EngineReference, Follower, choose_mode
from rlhf.reference.surveyed import SurveyedExamples
from rlhf.registry.gateway import BackendGateway
from rlhf.trainer import Average, Reference, Trainer


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
    folder: Path | None = None
    """See `rlhf.trainer.Run`."""
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
    engine_metrics: dict[str, float] = field(factory=dict)
    """See `rlhf.trainer.Run`."""
    followers: list[Follower] = field(factory=list)
    """Weights that move without being trained; they are saved and restored with the run."""

    @property
    def trained(self) -> dict[str, Role]:
        """The trained models by role, the policy among them."""
        return {name: role for name, role in self.roles.items() if role.spec.trained}

    def load(
        self,
        role: str,
        *,
        model: ModelConfig | None = None,
        lora: bool = False,
        trained: bool = True,
        task: Task = "causal",
        labels: int | None = None,
        extra: Mapping[str, Tensor | Average] | None = None,
        dropout: bool = True,
        optim: OptimConfig | None = None,
        first_step: int = 0,
    ) -> Engine:
        """See `rlhf.trainer.Run`."""
        config = config_with(self.config, model, optim)
        if lora:
            config = attrs.evolve(config, lora=self.config.lora)
        averages = {n: item for n, item in (extra or {}).items() if isinstance(item, Average)}
        own = {n: it.value if isinstance(it, Average) else it for n, it in (extra or {}).items()}
        for name, item in averages.items():
            source = (extra or {}).get(item.of)
            if not isinstance(source, Tensor) or source.shape != item.value.shape:
                raise RLHFError(
                    f"run.load(): the average {name!r} is of {item.of!r}, which is not a trained "
                    "extra parameter of its shape; correct its name or shape"
                )
        with naming_model(self.config, role, model):
            if model is not None:
                check_model_folder(model.path, name_in_errors(self.config, model, "path"))
            if trained:
                self.notes += notes_on_extra(config, own)
            found = [blank_of(part) for part in self.examples]
            image = next((example for example in found if example is not None), None)
            if image is not None and not reads_images(read_architecture(self.config)):
                image = None  # They are a trainer's own inputs of a model of text.
            on_images = image is not None and found[0] is not None
            if trained and not on_images and config.model.train and self.examples:
                raise RLHFError("model.train has no effect on data without images; remove it")
            if image is not None and config.model.part == "text":
                raise RLHFError(
                    "model.part text leaves out what reads images, and the data have images; "
                    "remove model.part"
                )
            spec = ModelSpec(
                role=role, config=config, trained=trained, model=model, optim=optim, task=task,
                labels=labels, extra=first_values(config, own), averages=averages, dropout=dropout,
                image=image, trains_on_images=on_images, first_step=first_step,
            )  # fmt: skip
            empty = empty_model(spec, self.mesh)
            if image is not None and not reads_images(empty.causal.config):
                raise RLHFError(
                    f"model.path {config.model.path} reads text only, and the data have images; "
                    "choose a model that reads images"
                )
            engine = self._load(spec, empty)
        self.followers += [
            Follower(
                engine=engine, source=engine, every=item.every, mix=item.share, hooks=self.hooks,
                names={EXTRA_PREFIX + name: EXTRA_PREFIX + item.of},
            )
            for name, item in averages.items()
        ]  # fmt: skip
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
