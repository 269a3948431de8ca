"""Core's configuration sections: frozen attrs classes, one per YAML section."""

from typing import Any, ClassVar, Literal

from attrs import field, frozen, validators

from rlhf.config.field_docs import documented
from rlhf.config.objective import objective

positive: Any = validators.gt(0)
not_negative: Any = validators.ge(0)
share: Any = validators.and_(validators.ge(0), validators.le(1))
below_one: Any = validators.and_(validators.ge(0), validators.lt(1))
optional: Any = validators.optional


def _positive_or_auto(instance: object, attribute: Any, value: Any) -> None:
    if value != "auto":
        positive(instance, attribute, value)


def _has_direction(instance: object, attribute: object, value: str) -> None:
    objective(value)


@documented
@frozen(kw_only=True)
class ModelConfig:
    """Which model is trained, and how it is held."""

    path: str = ""
    """Folder or hub name of a model in the transformers layout."""
    revision: str | None = None
    """Branch, tag or commit on the hub."""
    tokenizer: str | None = None
    """Folder or hub name of the tokenizer where it is not beside the model."""
    trust_remote_code: bool = False
    """Run Python code that comes with the model. Recorded in versions.json."""
    dtype: Literal["fp32", "bf16", "fp16"] = "bf16"
    """Precision of the weights in forward and backward; bf16 and fp16 keep fp32 masters."""
    init: Literal["pretrained", "random"] = "pretrained"
    """random builds the weights from the model's config alone."""
    quantize: Literal["nf4"] | None = None
    """Hold the frozen base in 4 bits (NF4, arXiv 2305.14314); needs lora and a CUDA device."""
    freeze: tuple[str, ...] = ()
    """Parameters that are not trained: shell patterns, such as `*.embed_tokens.*`."""
    adapter: str | None = None
    """Folder of a LoRA adapter to go on training."""
    kernels: Literal["auto", "liger", "compile", "none"] = "auto"
    """What runs the layers on CUDA. auto: with fp8 compile; else norms by kernels of ours, rotary
    embedding and gates by those of Liger (arXiv 2410.10989) for the families that docs/models.md
    names, where liger-kernel is installed. liger: this, or an error. compile: torch.compile of the
    layers of any family, at ZeRO stages 0 to 2, without quantize and with recompute none or full.
    none: the model's own."""
    fp8: Literal["tensorwise", "rowwise"] | None = None
    """Products of the layers in FP8, by this recipe of torchao: faster for large models, for a
    curve that is not quite the same. tensorwise: one scale for each tensor; rowwise: one for each
    row, which is slower. On GPUs of compute capability 8.9, for rowwise 9.0."""
    recompute: Literal["auto", "none", "selective", "full", "offload"] = "auto"
    """What is computed again in backward instead of kept, for the same curve. full: every layer
    (gradient checkpointing), a fifth to a quarter more time. selective: the products of gated
    layers, a quarter of the activations for 2 % more time. offload: as full, and each layer's input
    waits on the host. auto: the first of none, selective, full and offload with which a step fits
    the accelerator's memory."""


@documented
@frozen(kw_only=True)
class DataEntry:
    """One source of rows."""

    path: str
    """File (JSON, JSON lines, CSV, Parquet, Arrow), folder saved by datasets, or hub name."""
    subset: str | None = None
    """Configuration name on the hub."""
    split: str | None = None
    """Split of a hub or folder data set; default train."""
    weight: float = field(default=1.0, validator=positive)
    """How many times the rows are taken per epoch: 0.3 takes 30 % of them, 2 takes each twice."""
    limit: int | None = field(default=None, validator=optional(positive))
    """Take the first so many rows."""
    columns: dict[str, str] = field(factory=dict)
    """Column renames: `{prompt: question}` reads `prompt` from the column `question`."""
    convert: Literal["prm800k", "math_shepherd", "sharegpt"] | None = None
    """Turns rows as a well-known data set publishes them into rows of our formats, after the
    renames: PRM800K, Math-Shepherd, or messages written as `from` and `value`."""


@documented
@frozen(kw_only=True)
class DataConfig:
    """What is trained on and what is evaluated on."""

    train: tuple[DataEntry, ...] = ()
    """One path, one entry or a list of them."""
    eval: tuple[DataEntry, ...] = ()
    """Held-out rows; likewise."""
    max_tokens: int = field(default=4096, validator=positive)
    """Longest path (prompt plus one answer) in tokens."""
    too_long: Literal["drop", "cut", "error"] = "drop"
    """What happens to longer rows: dropped, cut at the end, or an error. The share is printed."""
    chat_template: str | None = None
    """File with a Jinja chat template, or `chatml`, instead of the tokenizer's own."""
    workers: int = field(default=1, validator=not_negative)
    """Loader processes per rank that pack batches ahead of the step."""
    processes: int | None = field(default=None, validator=optional(positive))
    """Processes that tokenise before the start; default one per core."""


@documented
@frozen(kw_only=True)
class BatchConfig:
    """How many rows make a step, and how many tokens fit at once."""

    size: int = field(default=32, validator=positive)
    """Examples per optimizer step over all ranks: the one batch number that changes learning."""
    tokens: int | Literal["auto"] = field(default="auto", validator=_positive_or_auto)
    """Tokens per micro-batch and rank: memory and speed only. Accumulation follows from it. auto is
    8192, or the largest example; on an accelerator more where that is faster, less where it would
    not fit."""

    @property
    def budget(self) -> int:
        """`tokens`, once a run has a number in the place of auto."""
        assert isinstance(self.tokens, int)
        return self.tokens


@documented
@frozen(kw_only=True)
class OptimConfig:
    """The optimizer and its schedule."""

    lr: float = field(default=2e-5, validator=positive)
    """Peak learning rate. With LoRA the default is ten times the trainer's."""
    name: Literal["adamw"] = "adamw"
    """AdamW (arXiv 1711.05101)."""
    schedule: Literal["constant", "linear", "cosine"] = "cosine"
    """Shape after warm-up; step k of N has the rate f(k / N)."""
    warmup: float = field(default=0.03, validator=not_negative)
    """Linear warm-up: a share of the steps below 1, else a number of steps."""
    min_lr: float = field(default=0.0, validator=share)
    """Floor of linear and cosine, as a share of lr."""
    weight_decay: float = field(default=0.0, validator=not_negative)
    """Decoupled weight decay; never on norms and biases."""
    clip: float = field(default=1.0, validator=not_negative)
    """Largest gradient norm; 0 does not clip."""
    betas: tuple[float, float] = field(
        default=(0.9, 0.999), validator=validators.deep_iterable(below_one)
    )
    """Decay of Adam's two moments."""
    eps: float = field(default=1e-8, validator=positive)
    """Adam's epsilon."""
    states: Literal["fp32", "bf16"] = "fp32"
    """Precision of the master weights and of Adam's moments. bf16 takes 4 or 6 bytes per parameter
    instead of 12 and rounds stochastically (arXiv 2010.06192), so that small updates are not lost;
    with model.dtype bf16."""


@documented
@frozen(kw_only=True)
class TrainConfig:
    """How long, from which seed, and what is said on the way."""

    epochs: int = field(default=1, validator=positive)
    """Passes over the training rows."""
    steps: int | None = field(default=None, validator=optional(positive))
    """Length of the schedule in optimizer steps; overrides epochs."""
    stop_at: int | None = field(default=None, validator=optional(positive))
    """End this run after that step, with a checkpoint; the schedule does not change."""
    hours: float | None = field(default=None, validator=optional(positive))
    """End this run after so much wall time, with a checkpoint; the schedule does not change."""
    seed: int = field(default=0, validator=validators.and_(not_negative, validators.lt(2**63)))
    """Seed of the order of rows, of new weights and of dropout."""
    deterministic: bool = False
    """Deterministic kernels only; slower on CUDA."""
    log_every: int = field(default=1, validator=positive)
    """Steps between lines of metrics.jsonl."""
    eval_every: int | None = field(default=None, validator=optional(positive))
    """Steps between evaluations; there is always one at the end."""
    eval_at_start: bool = False
    """Evaluate before the first step too."""
    patience: int | None = field(default=None, validator=optional(positive))
    """End the run after so many evaluations in a row without a better `checkpoint.best`."""
    trace: int | None = field(default=None, validator=optional(positive))
    """Record the three steps after this one with torch's profiler, into traces/ of the run folder.
    """


@documented
@frozen(kw_only=True)
class CheckpointConfig:
    """What can be resumed."""

    every: int | None = field(default=500, validator=optional(positive))
    """Steps between checkpoints; there is always one where a run stops, with null only that."""
    keep: int = field(default=3, validator=positive)
    """Newest checkpoints kept; older ones go once the newer is whole."""
    best: str | None = field(default=None, validator=optional(_has_direction))
    """Metric of an evaluation, such as eval/loss: the best one's checkpoint is kept and its weights
    are the exported model. A sign says that it should rise (+) or fall (-), where its name does
    not."""
    stop_timeout: float = field(default=600.0, validator=positive)
    """Seconds that a stopped run may take to save before its ranks are killed."""


@documented
@frozen(kw_only=True)
class LoraConfig:
    """Low-rank adapters (arXiv 2106.09685) through peft."""

    rank: int = field(default=16, validator=positive)
    """Rank of the update."""
    alpha: float | None = field(default=None, validator=optional(positive))
    """Scale of the update is alpha / rank; default twice the rank."""
    dropout: float = field(default=0.0, validator=share)
    """Dropout before the adapter."""
    targets: str | tuple[str, ...] = "all-linear"
    """Module names that get an adapter, or all-linear (all but the head)."""


@documented
@frozen(kw_only=True)
class Config:
    """Everything a run was asked to do. The reader adds the trainer's and the backend's section."""

    trainer_name: ClassVar[str]
    backend_name: ClassVar[str]

    model: ModelConfig = field(factory=ModelConfig)
    data: DataConfig = field(factory=DataConfig)
    batch: BatchConfig = field(factory=BatchConfig)
    optim: OptimConfig = field(factory=OptimConfig)
    train: TrainConfig = field(factory=TrainConfig)
    checkpoint: CheckpointConfig = field(factory=CheckpointConfig)
    lora: LoraConfig | None = None
    backend: str | None = None
    """Name of the backend; the only one installed is the default."""
    extensions: tuple[str, ...] = ()
    """Extensions whose hook wrappers are active."""
    observers: tuple[str, ...] = ()
    """Observers that are told of steps, evaluations and checkpoints."""
    output: str | None = None
    """Run folder; default runs/NAME-1, -2, ..."""

    @property
    def own(self) -> Any:
        """The trainer's own section."""
        return getattr(self, self.trainer_name)

    @property
    def backend_section(self) -> Any:
        """The backend's own section."""
        return getattr(self, self.backend_name)
