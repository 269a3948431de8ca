"""Core's configuration sections: frozen attrs classes, one per YAML section."""

import functools
import re
from collections.abc import Mapping
from typing import Any, ClassVar, Literal

import attrs
from attrs import field, frozen, validators

from rlhf.config.field_docs import documented
from rlhf.config.structure import setting_name

Recompute = Literal["auto", "none", "selective", "full"]

not_negative: Any = validators.ge(0)
fraction: Any = validators.and_(validators.ge(0), validators.le(1))
below_one: Any = validators.and_(validators.ge(0), validators.lt(1))
optional: Any = validators.optional


def positive(instance: object, attribute: Any, value: Any) -> None:
    """Accept numbers above 0, and integers only if they fit into 64 bits."""
    validators.gt(0)(instance, attribute, value)
    if isinstance(value, int):
        validators.lt(2**63)(instance, attribute, value)


def _positive_or_auto(instance: object, attribute: Any, value: Any) -> None:
    if value != "auto":
        positive(instance, attribute, value)


def _whole(value: float) -> float:
    """Return a whole number as an int, which is printed without a point."""
    return value if value % 1 else int(value)


def _arguments(instance: object, attribute: Any, value: Mapping[str, Any]) -> None:
    for name in value:
        if not name.isidentifier():
            raise ValueError(f"{name!r} is not the name of an argument")


def _rates(instance: object, attribute: Any, value: Mapping[str, float]) -> None:
    for part, rate in value.items():
        if part not in ("projector", "vision"):
            raise ValueError(f"{part!r} is not projector or vision")
        if not rate > 0:
            raise ValueError(f"the rate of {part} must be > 0: {rate}")


def _can_be_caught(instance: object, attribute: Any, value: tuple[str, ...]) -> None:
    if not value or set(value) - set(STOP_SIGNALS):
        raise ValueError(f"must be a list of {', '.join(STOP_SIGNALS)}")


def _has_direction(instance: object, attribute: object, value: str) -> None:
    objective(value)


@documented
@frozen(kw_only=True)
class ModelConfig:
    """The model that is trained, and how it is represented."""

    removed_settings: ClassVar[Mapping[str, tuple[Any, ...]]] = {"fp8": ("reference",)}
    path: str = ""
    """Folder or hub name of a model in the transformers layout."""
    revision: str | None = None
    """Branch, tag or commit on the hub."""
    part: Literal["whole", "text"] = "whole"
    """Of a model that also reads images. whole: its towers are frozen and exported with it. text:
    only its language model is loaded and exported, as a model of text."""
    tokenizer: str | None = None
    """Folder or hub name of the tokenizer, if it is not in the model's folder."""
    trust_remote_code: bool = False
    """Run Python code that comes with the model, its tokenizer or a teacher. Recorded in
    versions.json of the run."""
    dtype: Literal["fp32", "bf16", "fp16"] = "bf16"
    """Precision of the weights in forward and backward; bf16 and fp16 keep fp32 masters."""
    init: Literal["pretrained", "random"] = "pretrained"
    """random: create new weights from the model's config."""
    quantize: Literal["nf4"] | None = None
    """Keep the frozen base in 4 bits (NF4, arXiv 2305.14314). Needs lora and a CUDA device."""
    train: tuple[Literal["language", "projector", "vision"], ...] | None = None
    """Parts of a model that are trained on images; the others are frozen. Default: language and
    projector, with lora language. With lora, the linear layers of these parts are adapted. Data
    without images train only what text reaches."""
    freeze: tuple[str, ...] = ()
    """Parameters that are not trained, as shell patterns such as `*.embed_tokens.*`."""
    adapter: str | None = None
    """Folder of a LoRA adapter to continue training, or its name on the hub."""
    kernels: Literal["auto", "liger", "compile", "none"] = "auto"
    """Kernels of the layers on CUDA. none: the model's own. liger: fused norms, and Liger's rotary
    embedding and gates (arXiv 2410.10989), for the families in docs/models.md; an error if they
    cannot be used. compile: torch.compile of the layers, for any family; at ZeRO stages 0 to 2,
    without quantize, with recompute none or full. auto: compile with fp8, else those of liger
    that can be used."""
    fp8: Literal["tensorwise", "rowwise"] | None = None
    """Compute the layers' matrix products in FP8 by this recipe of torchao, except those of
    adapters. Faster for large models; the curve differs slightly. tensorwise: one scale per tensor;
    rowwise: one per row, slower in training. Needs GPUs of compute capability 9.0, for tensorwise
    8.9."""
    router_loss: float | None = field(default=None, validator=optional(not_negative))
    """Coefficient of the load-balancing loss of a mixture of experts (arXiv 2101.03961), which each
    step of training adds to the loss. It is computed over each example, so that the curve does not
    depend on how rows are divided. Default: `router_aux_loss_coef` of the model's config, if its
    routers are trained; 0 switches it off."""
    recompute: Recompute = "auto"
    """Activations that are recomputed in the backward pass instead of kept; the curve is the same.
    selective: the products of gated feed-forward layers, which saves a quarter of the activations
    for 2 % more time. full: every layer (gradient checkpointing), for a fifth to a quarter more
    time. auto: the first of none, selective and full with which a step fits in the accelerator's
    memory."""


@documented
@frozen(kw_only=True)
class DataEntry:
    """One source of rows."""

    removed_settings: ClassVar[Mapping[str, tuple[Any, ...]]] = {"convert": (None,)}
    path: str
    """File (JSON, JSON lines, CSV, Parquet, Arrow), folder saved by datasets, or hub name."""
    subset: str | None = None
    """Configuration name on the hub."""
    split: str | None = None
    """Split of a data set from a hub or folder; default: train."""
    weight: float = field(default=1.0, validator=positive)
    """How often the rows are used per epoch: 0.3 uses 30 % of them, 2 uses each twice."""
    limit: int | None = field(default=None, validator=optional(positive))
    """Use only this many rows, the first ones."""
    columns: dict[str, str] = field(factory=dict)
    """Renamed columns: `{prompt: question}` reads `prompt` from the column `question`."""


@documented
@frozen(kw_only=True)
class DataConfig:
    """The rows for training and for evaluation."""

    train: tuple[DataEntry, ...] = ()
    """One path, one entry or a list of them."""
    eval: tuple[DataEntry, ...] = ()
    """Held-out rows, likewise."""
    max_tokens: int = field(default=4096, validator=positive)
    """Maximum number of tokens of a prompt plus one answer."""
    too_long: Literal["drop", "cut", "error"] = "drop"
    """What to do with longer rows: drop them, cut them at the end, or report an error. The share of
    such rows is printed."""
    bad_images: Literal["error", "drop"] = "error"
    """What to do with rows with an image that cannot be used: report an error, or drop them. The
    share of such rows is printed."""
    chat_template: str | None = None
    """File with a Jinja chat template, or `chatml`, instead of the tokenizer's own."""
    chat_template_kwargs: dict[str, Any] = field(factory=dict, validator=_arguments)
    """Arguments of the chat template, such as {enable_thinking: false}, for rows that do not set
    them; the exported template has them as defaults."""
    workers: int = field(default=1, validator=not_negative)
    """Threads per rank that pack micro-batches ahead of the step; 0: the step packs its own, as
    with a rollout."""
    processes: int | None = field(default=None, validator=optional(positive))
    """Processes that tokenise the rows before the run; default: one per core."""


@documented
@frozen(kw_only=True)
class BatchConfig:
    """How many rows make up a step, and how many tokens are computed at once."""

    size: int = field(default=32, validator=positive)
    """Examples per optimizer step over all ranks: the only batch setting that affects learning."""
    tokens: int | Literal["auto"] = field(default="auto", validator=_positive_or_auto)
    """Tokens per micro-batch and rank: affects only memory and speed, and determines gradient
    accumulation. auto: 8192, or the size of the largest example; on an accelerator more if that is
    faster, and less if it would not fit."""

    @property
    def budget(self) -> int:
        """`tokens`, once a run has replaced auto by a number."""
        assert isinstance(self.tokens, int)
        return self.tokens


@documented
@frozen(kw_only=True)
class OptimizerKind:
    """An optimizer of a backend."""

    name: str
    """Its `optim.name`."""
    about: str = ""
    """What `rlhf config` says of it."""
    states: int = 2
    """How many numbers it keeps for each trained weight, in the dtype of the master weights."""
    layer_states: int | None = None
    """The same for weights in the layers, if it differs there."""
    without: tuple[str, ...] = ()
    """Settings in `optim` that it does not have, such as `eps`."""


ADAMW = OptimizerKind(name="adamw", about="AdamW (arXiv 1711.05101).")


@documented
@frozen(kw_only=True)
class OptimConfig:
    """The optimizer and its schedule."""

    lr: float = field(default=2e-5, validator=positive)
    """Peak learning rate. With LoRA the default is ten times the trainer's."""
    part_lr: dict[str, float] = field(factory=dict, validator=_rates)
    """Peak learning rates of parts of `model.train` where they differ from lr, such as {vision:
    2e-6, projector: 1e-4}."""
    name: str = "adamw"
    """The optimizer, one of those of the backend."""
    schedule: Literal["constant", "linear", "cosine"] = "cosine"
    """Learning rate after warm-up; that of step k of N is f(k / N)."""
    warmup: float = field(default=0.03, validator=not_negative)
    """Linear warm-up: a share of all steps if below 1, else a number of steps."""
    min_lr: float = field(default=0.0, validator=fraction)
    """Final rate of linear and cosine, as a share of lr."""
    weight_decay: float = field(default=0.0, validator=not_negative)
    """Decoupled weight decay; not applied to norms and biases."""
    clip: float = field(default=1.0, validator=not_negative)
    """Gradient norm above which gradients are scaled down; 0 disables clipping."""
    betas: tuple[float, float] = field(
        default=(0.9, 0.999), validator=validators.deep_iterable(below_one)
    )
    """Decay rates of the optimizer's two moments; the first is a momentum's."""
    eps: float = field(default=1e-8, validator=positive)
    """Epsilon of AdamW's division."""
    states: Literal["fp32", "bf16"] = "fp32"
    """Precision of the master weights and of Adam's moments. bf16 needs 4 or 6 bytes per parameter
    instead of 12 and rounds stochastically (arXiv 2010.06192), so that small updates are not lost.
    Needs model.dtype bf16 and adamw."""


@documented
@frozen(kw_only=True)
class TrainConfig:
    """Length, seed, logging and evaluation of the run."""

    removed_settings: ClassVar[Mapping[str, tuple[Any, ...]]] = {"trace": (None,)}
    epochs: float = field(default=1, converter=_whole, validator=positive)
    """Passes over the training rows. 0.5 is the first half of the optimizer steps of an epoch; a
    part of a step counts as a step."""
    steps: int | None = field(default=None, validator=optional(positive))
    """Length of the schedule in optimizer steps; overrides epochs."""
    stop_at: int | None = field(default=None, validator=optional(positive))
    """Stop after this step, with a checkpoint; the schedule does not change."""
    hours: float | None = field(default=None, validator=optional(positive))
    """Stop after this many hours, with a checkpoint; the schedule does not change."""
    seed: int = field(default=0, validator=validators.and_(not_negative, validators.lt(2**63)))
    """Seed of the order of rows, new weights and dropout."""
    deterministic: bool = False
    """Use only deterministic kernels; slower on CUDA."""
    log_every: int = field(default=1, validator=positive)
    """Steps between lines in metrics.jsonl."""
    eval_every: int | None = field(default=None, validator=optional(positive))
    """Steps between evaluations; there is always one at the end."""
    eval_at_start: bool = False
    """Also evaluate before the first step."""
    samples: int = field(default=0, validator=not_negative)
    """Number of held-out rows for which each evaluation prints and stores the policy's most likely
    answer, or, for reward models, the scores of the row's answers."""
    patience: int | None = field(default=None, validator=optional(positive))
    """Stop after this many evaluations in a row without an improvement of `checkpoint.best`."""


@documented
@frozen(kw_only=True)
class RolloutsConfig:
    """The answers that a trainer learns from and that evaluations show."""

    engine: str = "embedded"
    """What writes them. embedded: the model itself, in the processes of the run; needs
    rlhf-rollouts."""
    lag: int = field(default=0, validator=fraction)
    """By how many rollouts the weights that write answers are older than those that learn from
    them. 1: a server writes the answers of the next rollout while the steps of this one run."""
    keep: int | None = field(default=None, validator=optional(not_negative))
    """How many of the newest rollouts, and of the newest evaluations, on-policy trainers keep as
    files in `rollouts/` of the run folder; 0: none. Default: all."""
    replay: str | None = None
    """Folder of a run whose recorded answers are trained on in place of new ones; needs
    rlhf-rollouts. Evaluations still write new answers."""


@documented
@frozen(kw_only=True)
class CheckpointConfig:
    """Checkpoints, from which a run can be resumed."""

    every: int | None = field(default=500, validator=optional(positive))
    """Steps between checkpoints; null: only the one that a run always saves when it stops."""
    keep: int = field(default=3, validator=positive)
    """How many checkpoints to keep; older ones are deleted once a new one is complete."""
    max_gb: float | None = field(default=None, validator=optional(positive))
    """Maximum size of all kept checkpoints in gigabytes (10^9 bytes); older ones are deleted as
    with keep."""
    async_: bool = False
    """Copy the state to host memory between steps, and write it while training continues. Needs
    host memory for a copy."""
    best: str | None = field(default=None, validator=optional(_has_direction))
    """Metric of an evaluation, such as eval/loss. The checkpoint of the best evaluation is kept,
    and the exported model has its weights. A sign says that the metric should rise (+) or fall
    (-), if the name does not show it."""
    stop_timeout: float = field(default=600.0, validator=positive)
    """Seconds in which a stopped run may save before its ranks are killed."""
    stop_signals: tuple[str, ...] = field(default=("TERM",), validator=_can_be_caught)
    """Signals on which a run saves and ends, such as [TERM, USR1]; Ctrl-C is always one."""


@documented
@frozen(kw_only=True)
class LoraConfig:
    """Low-rank adapters (arXiv 2106.09685), by peft."""

    rank: int = field(default=16, validator=positive)
    """Rank of the update."""
    alpha: float | None = field(default=None, validator=optional(positive))
    """The update is scaled by alpha / rank; default: twice the rank."""
    rslora: bool = False
    """Scale it by alpha / sqrt(rank) instead, which lets high ranks learn (arXiv 2312.03732)."""
    dropout: float = field(default=0.0, validator=fraction)
    """Dropout of the adapter's input."""
    targets: str | tuple[str, ...] = "all-linear"
    """Names of the modules with an adapter. all-linear: the linear layers that text reaches, except
    the head and routers."""
    parameters: tuple[str, ...] = ()
    """Ends of the names of stacked weights with an adapter for each matrix, such as
    experts.gate_up_proj and experts.down_proj of a mixture of experts, which are not modules."""
    dora: bool = False
    """Also train the norm of each row of an adapted weight (DoRA, arXiv 2402.09353)."""
    modules_to_save: tuple[str, ...] = ()
    """Names of modules that are trained whole and saved with the adapter, such as embed_tokens."""


LORA_VARIANTS = {"rslora": "use_rslora", "dora": "use_dora"}
"""The settings in `lora` that choose a variant of LoRA, and the argument of peft that takes the
value of each."""
READ_BASE = {"dora": "DoRA"}
"""The variants that read the base's weight outside of its forward, and their names in errors. They
work neither in FP8 nor at ZeRO stage 3, nor for stacked weights."""


@frozen(kw_only=True)
class NamedSections:
    """Plugins with a section of settings each."""

    @property
    def by_name(self) -> dict[str, Any]:
        """The section of each plugin."""
        return {setting_name(it): getattr(self, it.name) for it in attrs.fields(type(self))}


@documented
@frozen(kw_only=True)
class Extensions(NamedSections):
    """Extensions, which wrap hooks of the backend: [NAME, ...], or {NAME: {SETTING: VALUE}} with
    settings of their own. The first is the outermost."""


@documented
@frozen(kw_only=True)
class Observers(NamedSections):
    """Observers, which receive the metrics, evaluations and checkpoints of a run: [NAME, ...], or
    {NAME: {SETTING: VALUE}} with settings of their own."""


@documented
@frozen(kw_only=True)
class Config:
    """The whole configuration; the reader adds the trainer's and the backend's section."""

    trainer_key: ClassVar[str]
    """What the trainer was found by: its name, or `FILE.py:CLASS`."""
    trainer_name: ClassVar[str]
    backend_name: ClassVar[str]
    optimizers: ClassVar[tuple[OptimizerKind, ...]] = (ADAMW,)
    """Those of the backend."""

    model: ModelConfig = field(factory=ModelConfig)
    data: DataConfig = field(factory=DataConfig)
    batch: BatchConfig = field(factory=BatchConfig)
    optim: OptimConfig = field(factory=OptimConfig)
    train: TrainConfig = field(factory=TrainConfig)
    rollouts: RolloutsConfig = field(factory=RolloutsConfig)
    checkpoint: CheckpointConfig = field(factory=CheckpointConfig)
    lora: LoraConfig | None = None
    backend: str | None = None
    """Name of the backend; default: the only one installed."""
    extensions: Extensions = field(factory=Extensions)
    observers: Observers = field(factory=Observers)
    output: str | None = None
    """Run folder; default: runs/NAME-1, -2, ..."""

    @property
    def optimizer_kind(self) -> OptimizerKind:
        """What the backend says of the optimizer `optim.name`."""
        named = (kind for kind in self.optimizers if kind.name == self.optim.name)
        return next(named, OptimizerKind(name=self.optim.name))

    @property
    def own(self) -> Any:
        """The trainer's own section."""
        return getattr(self, self.trainer_name)

    @property
    def backend_section(self) -> Any:
        """The backend's own section."""
        return getattr(self, self.backend_name)


STOP_SIGNALS = ("TERM", "USR1", "USR2", "HUP", "QUIT", "XCPU")


FALLING = {"loss"}
RISING = {"accuracy", "accuracies", "margin", "margins", "auc", "f1"}
"""Words in the name of a metric that tell its direction."""


@functools.cache
def objective(text: str) -> tuple[str, int]:
    """Return the metric that `text` names, and 1 if it should rise or -1 if it should fall.

    The direction is its leading sign, or follows from a word of its name. Raises ValueError if
    neither tells it.
    """
    name = text.lstrip("+-")
    if not name.startswith("eval/"):
        raise ValueError(f"expected a metric of an evaluation such as eval/loss, got {text}")
    if text != name:
        return name, -1 if text.startswith("-") else 1
    words = set(re.split(r"[^a-z0-9]+", name.lower()))
    if bool(words & FALLING) == bool(words & RISING):
        raise ValueError(f"{name} needs a direction; write +{name} or -{name} (rise or fall)")
    return name, -1 if words & FALLING else 1
