"""The section `deepspeed:`: presets, what they set, and the combinations that are refused."""

import difflib
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar, Literal

import attrs
from attrs import field, frozen, validators

from rlhf.errors import RLHFError, nearest
from rlhf_plugin_deepspeed.capabilities import CAPABILITIES, RAW, check_capabilities, check_version
from rlhf_plugin_deepspeed.versions import installed_version

optional = validators.optional


@frozen(kw_only=True)
class Resolved:
    """What a preset sets, and the section with its preset filled in."""

    stage: int | str
    offload_optimizer: bool = False
    offload_param: bool = False
    dtype: str | None = None
    """The `model.dtype` that the preset stands for."""
    reason: str = ""
    """Of a preset: why to choose it."""


PRESETS = {
    "ddp": Resolved(stage=0, reason="everything fits on each device"),
    "zero1": Resolved(stage=1, reason="the optimizer's states do not fit on each device"),
    "zero2": Resolved(stage=2, reason="the gradients do not fit either"),
    "zero2_bf16": Resolved(
        stage=2, dtype="bf16", reason="as `zero2`, and sets `model.dtype` to bf16"
    ),
    "zero2_fp16": Resolved(
        stage=2,
        dtype="fp16",
        reason="as `zero2`, and sets `model.dtype` to fp16, for devices without bf16",
    ),
    "zero3": Resolved(stage=3, reason="the weights do not fit either; slower"),
    "zero1_offload": Resolved(
        stage=1, offload_optimizer=True, reason="the states do not fit on all devices together"
    ),
    "zero2_offload": Resolved(
        stage=2, offload_optimizer=True, reason="as `zero1_offload`; gradients are on the CPU too"
    ),
    "zero3_offload": Resolved(
        stage=3,
        offload_optimizer=True,
        offload_param=True,
        reason="the weights do not fit on all devices together; the slowest",
    ),
}
OTHER_NAMES = {
    "zero": "ddp",
    "zero0": "ddp",
    "zero1_cpuoffload": "zero1_offload",
    "zero2_cpuoffload": "zero2_offload",
    "zero3_cpuoffload": "zero3_offload",
    "zero2-bf16": "zero2_bf16",
    "zero2-fp16": "zero2_fp16",
}
"""Names that ROLL and trlX use."""
TRIED = "0.19.8"
"""The newest DeepSpeed with which DeepCompile and AutoEP were tried: benchmarks/NOTES.md."""
REFUSED = {
    name: f"{ours} decides it"
    for ours, names in {
        "batch.size": "train_batch_size",
        "batch.tokens": "train_micro_batch_size_per_gpu gradient_accumulation_steps",
        "optim": "optimizer",
        "optim.clip": "gradient_clipping",
        "optim.schedule": "scheduler",
        "model.dtype": "bf16 fp16.enabled amp torch_autocast",
        "model.recompute": "activation_checkpointing",
        "deepspeed.stage": "zero_optimization.stage",
        "deepspeed.offload_optimizer": "zero_optimization.offload_optimizer",
        "deepspeed.offload_param": "zero_optimization.offload_param",
        "deepspeed.nvme_path": "zero_optimization.offload_optimizer.nvme_path "
        "zero_optimization.offload_param.nvme_path",
        "deepspeed.offload_ratio": "zero_optimization.offload_optimizer.ratio",
        "deepspeed.bucket_size": "zero_optimization.reduce_bucket_size "
        "zero_optimization.allgather_bucket_size",
        "deepspeed.persistence_threshold": "zero_optimization.stage3_param_persistence_threshold",
        "deepspeed.hpz_partition_size": "zero_optimization.zero_hpz_partition_size",
        "observers": "tensorboard wandb csv_monitor",
    }.items()
    for name in names.split()
} | {
    "compile": f"DeepCompile, tried with deepspeed {TRIED}, is not offered: it adds up gradients "
    "for each compiled graph, and loses some where the micro-batches of a step run different ones; "
    "set model.kernels to compile, at stages 0 to 2",
    "tensor_parallel": "deepspeed.tensor_parallel decides it",
    "expert_parallel": f"AutoEP, tried with deepspeed {TRIED}, is not offered: it renames experts "
    "and divides them over ranks, so exports and adapters would be incomplete; remove it, or use "
    "stage 3, which shards experts",
} | {
    f"zero_optimization.zero_quantized_{name}": "it rounds what ranks exchange to 8 or 4 bits, "
    "which changes the curve; deepspeed.hpz_partition_size does not"
    for name in ("weights", "gradients", "nontrainable_weights")
}  # fmt: skip
"""Why a key of DeepSpeed's JSON cannot be set."""


def known_preset(section: object, attribute: object, value: str) -> None:
    """Raise ValueError unless `value` is a preset or auto."""
    names = ("auto", *PRESETS, *OTHER_NAMES)
    if value not in names:
        near = nearest(value.lower(), names)
        hint = f"; did you mean {near}?" if near else f"; available: {', '.join(names)}"
        raise ValueError(f"unknown preset {value}{hint}")


def allowed_keys(section: object, attribute: object, value: Mapping[str, Any]) -> None:
    """Raise ValueError with every key of DeepSpeed's JSON that cannot be set beside a preset."""
    kinds = {row.setting.removeprefix(RAW): row.kind for row in CAPABILITIES if row.kind}
    problems = []
    for key, setting in leaves(value):
        if why := [why for name, why in REFUSED.items() if f"{key}.".startswith(f"{name}.")]:
            problems.append(f"remove {key} ({why[-1]})")
        elif key not in kinds:
            near = difflib.get_close_matches(key, kinds, n=1, cutoff=0.8)
            hint = f"did you mean {near[0]}?" if near else f"available: {', '.join(kinds)}"
            problems.append(f"{key} cannot be set here; {hint}")
        elif [type(setting)] != [kinds[key]] or setting < 0:
            expected = "true or false" if kinds[key] is bool else "a whole number"
            problems.append(f"{key} expects {expected}, got {setting}")
    if problems:
        raise ValueError("; ".join(problems))


def leaves(tree: Mapping[str, Any], above: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the dotted name and the value of everything that is not a mapping."""
    for key, value in tree.items():
        if isinstance(value, Mapping):
            yield from leaves(value, f"{above}{key}.")
        else:
            yield f"{above}{key}", value


def _not_nvme(value: Any) -> str | None:
    return "set it to true and deepspeed.nvme_path to a folder" if value == "nvme" else None


@frozen(kw_only=True)
class DeepSpeedConfig:
    """How the model's states are spread over the ranks (ZeRO, arXiv 1910.02054)."""

    not_offered: ClassVar[Mapping[str, str]] = {
        key.rpartition(".")[2]: reason for key, reason in REFUSED.items()
    } | {"deepcompile": REFUSED["compile"]}
    """Settings that are not offered, and keys of DeepSpeed's JSON, with the alternative."""
    preset: str = field(default="auto", validator=known_preset)
    """auto, ddp (also zero, zero0), zero1, zero2, zero3; zero2_bf16, zero2_fp16 (these also set
    model.dtype); zero1_offload, zero2_offload (optimizer on the CPU), zero3_offload (optimizer and
    parameters on the CPU). `_cpuoffload` is another spelling of `_offload`."""
    stage: Literal["auto", 0, 1, 2, 3] = "auto"
    """ZeRO stage: 0 shards nothing, 1 the optimizer's states, 2 also the gradients, 3 also the
    weights. auto: the preset's stage, else the fastest in which a step fits the accelerator; if
    that is not known, the lowest whose states fit 60 % of its memory."""
    offload_optimizer: bool | None = field(default=None, metadata={"instead": _not_nvme})
    """Optimizer states and step on the CPU (ZeRO-Offload, arXiv 2101.06840), stages 1 to 3;
    default: the preset's."""
    offload_param: bool | None = field(default=None, metadata={"instead": _not_nvme})
    """Weights on the CPU between uses, stage 3; default: the preset's."""
    offload_ratio: float = field(
        default=1.0, validator=validators.and_(validators.gt(0), validators.le(1))
    )
    """Stage 3: the share of the masters and the optimizer's states that offload_optimizer puts on
    the CPU. The rest stays on the accelerator and is updated there (Twin-Flow of
    ZeRO-Offload++)."""
    nvme_path: str | None = None
    """A folder on a local disk of each host for what offload_optimizer and offload_param put on the
    CPU: master weights, the optimizer's states and parameters (ZeRO-Infinity, arXiv 2104.07857).
    They need no host memory beyond what is free."""
    sequence_parallel: int = field(default=1, validator=validators.ge(1))
    """Number of ranks that divide the tokens of each packed row, for rows that are too long for one
    accelerator (DeepSpeed-Ulysses, arXiv 2309.14509). It must divide the number of ranks and
    the model's attention heads."""
    tensor_parallel: int = field(default=1, validator=validators.ge(1))
    """Number of ranks that divide the layers of the model (Megatron-LM, arXiv 1909.08053), stages 0
    to 2, for models that do not fit one accelerator. It must divide the number of ranks, the
    attention heads, the key-value heads and the width of the feed-forward layers."""
    frozen: Literal["auto", 0, 3, "offload"] = "auto"
    """Models that are not trained, such as a reference or a teacher: 0 holds them whole on every
    rank, 3 in shards, offload in shards on the CPU between uses. auto is the first for which all
    models take at most 60 % of the accelerator's memory (0) or 80 % (3)."""
    offload_states: Literal["auto", "always", "never"] = "auto"
    """Move the optimizer's states, masters and gradients to the host during evaluations, while a
    reference is cached, and while answers are generated (then also the weights of other models).
    auto: only if the phase would otherwise not fit the accelerator."""
    timeout: float = field(
        default=30.0, validator=validators.and_(validators.gt(0), validators.le(10**6))
    )
    """Minutes a rank waits for the others in a collective before the run fails (DeepSpeed's own
    default is 10)."""
    persistence_threshold: int | None = field(default=None, validator=optional(validators.ge(0)))
    """Stage 3: parameters with at most this many elements stay whole on every rank; DeepSpeed's
    default is 100000."""
    hpz_partition_size: int = field(default=1, validator=validators.ge(1))
    """Stage 3: number of ranks, usually those of one host, that share a second copy of the weights,
    so that only the first gathering after an update crosses hosts (hpZ of ZeRO++, arXiv
    2306.10209). It must divide the number of ranks; 1 keeps no second copy."""
    bucket_size: int | None = field(default=None, validator=optional(validators.gt(0)))
    """Stages 1 to 3: elements that are reduced or gathered at once; default 2e8, or the model's
    size if smaller. Reductions during backward: the size of a layer, 5e7 to 2e8."""
    patches: Literal["all", "correctness"] = "all"
    """Which patches of DeepSpeed are installed: all of docs/backends.md, or only those that correct
    results need. A DeepSpeed newer than the tested ones gets only those."""
    config: dict[str, Any] = field(factory=dict, validator=allowed_keys)
    """Keys of DeepSpeed's own JSON on top of the preset, such as
    `{zero_optimization: {overlap_comm: false}}`. docs/backends.md lists them; a key that another
    setting decides is an error."""


def resolve(section: DeepSpeedConfig) -> Resolved:
    """Return the section with its preset filled in. Raises RLHFError where they contradict."""
    preset = PRESETS.get(OTHER_NAMES.get(section.preset, section.preset))
    if preset is None:
        only_3 = (
            section.offload_param or section.offload_ratio < 1 or section.hpz_partition_size > 1
        )
        preset = Resolved(stage=3 if only_3 and section.stage == "auto" else section.stage)
    elif section.stage not in ("auto", preset.stage):
        raise RLHFError(
            f"deepspeed.stage is {section.stage} but the preset {section.preset} is stage "
            f"{preset.stage}; set only one of the two"
        )
    for setting in ("offload_optimizer", "offload_param"):
        if getattr(preset, setting) and getattr(section, setting) is False:
            raise RLHFError(
                f"deepspeed.{setting} is false but the preset {section.preset} turns it on; use "
                f"the preset zero{preset.stage}"
            )
    return Resolved(
        stage=preset.stage,
        offload_optimizer=preset.offload_optimizer or bool(section.offload_optimizer),
        offload_param=preset.offload_param or bool(section.offload_param),
        dtype=preset.dtype,
    )


def defaults(section: Mapping[str, Any]) -> dict[str, Any]:
    """Return the changes of core's defaults that follow from the preset, as the user wrote it."""
    name = str(section.get("preset"))
    preset = PRESETS.get(OTHER_NAMES.get(name, name))
    return {"model.dtype": preset.dtype} if preset and preset.dtype else {}


def check(config: Any) -> None:
    """Raise RLHFError for what cannot run or would have no effect, without heavy imports."""
    section, precision, version = config.backend_section, config.model.dtype, installed_version()
    check_version(version)
    if "8bit" in config.optim.name.lower():
        raise RLHFError(
            "optim.name: moments of 8 bits are not offered; set optim.states to bf16, which takes "
            "no more memory"
        )
    resolved = resolve(section)
    if resolved.dtype not in (None, precision):
        raise RLHFError(
            f"model.dtype is {precision} but the preset {section.preset} is {resolved.dtype}; set "
            "only one of the two"
        )
    settings = settings_of(config, resolved)
    check_capabilities(settings, stage=resolved.stage, precision=precision, version=version)


def settings_of(config: Any, resolved: Resolved) -> list[str]:
    """Return the settings of `capabilities.CAPABILITIES` that the configuration turns on."""
    section: DeepSpeedConfig = config.backend_section
    decided = {
        "deepspeed.offload_optimizer": resolved.offload_optimizer,
        "deepspeed.offload_param": resolved.offload_param,
        "deepspeed.offload_states": section.offload_states == "always",
        "deepspeed.persistence_threshold": section.persistence_threshold is not None
        and section.frozen in ("auto", 0),
    }
    rows = (row for row in CAPABILITIES if row.setting and not row.setting.startswith(RAW))
    names = dict.fromkeys(name for row in rows for name in (row.setting, *row.excludes))
    raw = [f"{RAW}{key}" for key, _ in leaves(section.config)]
    return [name for name in names if decided.get(name, _is_set(config, name))] + raw


def _is_set(config: Any, setting: str) -> bool:
    """Return whether `SECTION.NAME` is not the default, or `SECTION.NAME VALUE` has that value."""
    name, _, value = setting.partition(" ")
    place, _, key = name.partition(".")
    section = config.backend_section if place == "deepspeed" else getattr(config, place)
    if section is None:
        return False
    (item,) = (item for item in attrs.fields(type(section)) if item.name.rstrip("_") == key)
    found = getattr(section, item.name)
    return str(found) == value if value else found != item.default


def overlay(settings: dict[str, Any], raw: Mapping[str, Any]) -> dict[str, Any]:
    """Return DeepSpeed's `settings` with the values of `raw` over them, key by key."""
    merged = dict(settings)
    for key, value in raw.items():
        below = merged.get(key)
        merged[key] = overlay(below, value) if isinstance(below, dict) else value
    return merged
