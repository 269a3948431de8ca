"""A model of a run: what its trainer asks for, its engine, its plan and its memory."""

from collections.abc import Collection, Iterable, Mapping, Sequence

import attrs
from attrs import field, frozen
from torch import Tensor
from torch.optim.lr_scheduler import LRScheduler

from rlhf.config.sections import Config, ModelConfig, OptimConfig
from rlhf.data.example import Example
from rlhf.engine import Engine, Layout, Mesh, ModelShape, Plan
from rlhf.errors import RLHFError
from rlhf.model.probe import AttentionPath
from rlhf.model.task import Task
from rlhf.registry.gateway import BackendGateway

POLICY = "policy"
"""The role of the model that every run trains."""
ELSEWHERE = ("updating", "reducing", "host", "nvme")
"""Parts of a backend's estimate that an accelerator does not hold from step to step."""


@frozen(kw_only=True)
class ModelSpec:
    """A model as a trainer's `setup` asks for it."""

    role: str = POLICY
    config: Config
    """The run's configuration, with the model's own `model` and `optim`."""
    trained: bool = True
    model: ModelConfig | None = None
    """Its configuration; None for that of the run, or a module of the trainer's own."""
    optim: OptimConfig | None = None
    """Its optimizer's configuration; None for that of the run."""
    task: Task | None = None
    """What its head predicts; None for a module of the trainer's own."""
    labels: int | None = None
    """Number of its labels; None for that of its task."""
    extra: Mapping[str, Tensor] = field(factory=dict)
    """First values of the trainer's own parameters at its head."""
    averages: Collection[str] = ()
    """Names of those that are averages of others, so not trained."""
    dropout: bool = True
    """Whether it keeps its own dropout."""
    image: Example | None = field(default=None, eq=False)
    """The smallest example with images of the run's data; None if these have none."""
    trains_on_images: bool = False
    """Whether the rows that it is trained on have images."""
    first_step: int = 0
    """Number of optimizer steps of the run that leave it as it is, before its own first one."""

    @property
    def head_task(self) -> Task:
        """The task of a model of transformers; causal unless another one is set."""
        return self.task or "causal"


@frozen(kw_only=True)
class Role:
    """A loaded model."""

    spec: ModelSpec
    engine: Engine
    plan: Plan
    shape: ModelShape
    memory: Mapping[str, int]
    """Bytes on each accelerator, as the backend estimates them."""
    attention: AttentionPath | None = None
    """How it runs packed batches; None in a rehearsal and for a module of the trainer's own."""
    schedule: LRScheduler | None = None
    """The learning rate's; None in a rehearsal and if it is not trained."""

    @property
    def learning_rate(self) -> float:
        """The rate of its next step."""
        assert self.schedule is not None, f"{self.engine.role} is not trained"
        return float(self.schedule.get_last_lr()[0])


def trained_share(shape: ModelShape) -> str:
    """Return how many parameters of a trained model are trained, in words; "" if all are."""
    return "" if shape.trainable == shape.parameters else f"{shape.trainable:,} trained"


def config_with(config: Config, model: ModelConfig | None, optim: OptimConfig | None) -> Config:
    """Return the configuration of a model: that of the run unless it has its own.

    Raises RLHFError for an optimizer whose states have another precision than those of the run.
    """
    if optim is not None and optim.states != config.optim.states:
        raise RLHFError(
            f"a model of the trainer has optim.states {optim.states}, but those of the run are "
            f"{config.optim.states}; all trained models use optim.states of the configuration"
        )
    config = attrs.evolve(config, optim=optim or config.optim)
    return config if model is None else attrs.evolve(config, model=model, lora=None)


def layouts_of(
    hooks: BackendGateway, config: Config, mesh: Mesh, shape: ModelShape
) -> Sequence[Layout]:
    """Return the backend's layouts of the trained model, or its plan if it knows of none."""
    if layouts := hooks.layouts(config=config, mesh=mesh, model_shape=shape):
        return layouts
    plan = hooks.configure_zero(
        config=config, mesh=mesh, model_shape=shape, role=POLICY, trained=True, occupied=0
    )
    return [Layout(name="", settings="", config=config, plan=plan, cost=0.0, configured=True)]


def plan_model(
    hooks: BackendGateway, spec: ModelSpec, mesh: Mesh, shape: ModelShape, others: Iterable[Role]
) -> Plan:
    """Return how the backend will run a model together with `others`, which are already loaded."""
    occupied = sum(
        size for other in others for name, size in other.memory.items() if name not in ELSEWHERE
    )
    return hooks.configure_zero(
        config=spec.config, mesh=mesh, model_shape=shape, role=spec.role, trained=spec.trained,
        occupied=occupied,
    )  # fmt: skip


def memory_of(
    hooks: BackendGateway, spec: ModelSpec, mesh: Mesh, shape: ModelShape, plan: Plan
) -> Mapping[str, int]:
    """Return the bytes of a model on each accelerator, as the backend estimates them."""
    return hooks.estimate_memory(
        config=spec.config, plan=plan, model_shape=shape, mesh=mesh, trained=spec.trained
    )
