"""What this backend can do, at which ZeRO stages and with which DeepSpeed: one table for the checks
of the configuration, for `rlhf doctor` and for docs/backends.md."""

from collections.abc import Collection, Mapping
from typing import Any

from attrs import frozen

from rlhf.errors import RLHFError
from rlhf.plugin import READ_BASE
from rlhf_plugin_deepspeed.kinds import TITLES
from rlhf_plugin_deepspeed.versions import older

LEAST = "0.19.0"
BEFORE = "0.20"
"""The first DeepSpeed that may be too different for the patches."""
RAW = "deepspeed.config."
"""The prefix of settings that are keys of DeepSpeed's own JSON."""
PRECISIONS = ("fp32", "bf16", "fp16")
STAGES = (0, 1, 2, 3)


@frozen(kw_only=True)
class Capability:
    """One row: a feature and where it holds."""

    feature: str
    setting: str
    """The key that turns it on, or "" where it is always on."""
    least: str = LEAST
    """The first DeepSpeed that has it."""
    stages: tuple[int, ...] = STAGES
    precisions: tuple[str, ...] = PRECISIONS
    """Values of `model.dtype` that it can be combined with."""
    excludes: tuple[str, ...] = ()
    """Settings that it cannot be combined with."""
    needs: str = ""
    """The setting that it needs."""
    optional_stage: bool = True
    """Whether `stage: auto` chooses among the stages at which it works."""
    alternative: str = ""
    """The remedy at another stage, as the end of an error."""
    kind: type | None = None
    """The type of the value, if the setting is a key of DeepSpeed's own JSON."""

    def works_at(self, stage: int | str) -> bool:
        """Return whether it works at a stage, or at the one that `auto` chooses."""
        if stage == "auto":
            return self.stages == STAGES or (self.optional_stage and not self.kind)
        return stage in self.stages


CAPABILITIES = (
    Capability(feature="ZeRO", setting="deepspeed.stage"),
    Capability(
        feature="optimizer on the CPU",
        setting="deepspeed.offload_optimizer",
        stages=(1, 2, 3),
        alternative="remove it or use the preset zero1_offload",
    ),
    Capability(
        feature="a part of the optimizer on the CPU (Twin-Flow of ZeRO-Offload++)",
        setting="deepspeed.offload_ratio",
        stages=(3,),
        needs="deepspeed.offload_optimizer",
        excludes=("deepspeed.nvme_path",),
        alternative="remove it or set deepspeed.stage to 3",
    ),
    # A checkpoint that is written beside the next steps is copied to the host's memory before.
    Capability(
        feature="optimizer and offloaded parameters on NVMe",
        setting="deepspeed.nvme_path",
        stages=(1, 2, 3),
        needs="deepspeed.offload_optimizer",
        excludes=("checkpoint.async",),
        alternative="remove it or use the preset zero1_offload",
    ),
    Capability(
        feature="parameters on the CPU",
        setting="deepspeed.offload_param",
        stages=(3,),
        excludes=("model.quantize",),
        alternative="remove it or use the preset zero3_offload",
    ),
    # Our own code over torch's storages: DeepSpeed's call has a least version, this has none.
    Capability(
        feature="states on the CPU in phases that do not need them",
        setting="deepspeed.offload_states",
    ),
    Capability(
        feature="small parameters kept whole",
        setting="deepspeed.persistence_threshold",
        stages=(3,),
        optional_stage=False,
        alternative="remove it or set deepspeed.stage to 3",
    ),
    Capability(
        feature="second copy of the weights within a host (hpZ of ZeRO++)",
        setting="deepspeed.hpz_partition_size",
        least="0.19.8",
        stages=(3,),
        excludes=("deepspeed.offload_param", "deepspeed.tensor_parallel"),
        alternative="remove it or set deepspeed.stage to 3",
    ),
    Capability(
        feature="size of reduced and gathered buckets",
        setting="deepspeed.bucket_size",
        stages=(1, 2, 3),
        alternative="remove it or use the preset zero1",
    ),
    # Our own attention; DeepSpeed only adds up over all ranks of both axes.
    Capability(
        feature="tokens of a row divided over ranks",
        setting="deepspeed.sequence_parallel",
        excludes=(
            "deepspeed.tensor_parallel",
            "model.kernels compile",
            "model.fp8",
        ),
    ),
    Capability(
        feature="4-bit base under LoRA",
        setting="model.quantize",
        stages=(0, 1, 2),
        precisions=("fp32", "bf16"),
        excludes=("deepspeed.offload_param",),
        alternative="use the preset zero2, which shards what the adapter trains",
    ),
    # peft reads the base weight outside of its layer's forward.
    *(
        Capability(
            feature=f"{title} adapters",
            setting=f"lora.{name}",
            stages=(0, 1, 2),
            alternative="use the preset zero2, which shards what the adapter trains",
        )
        for name, title in READ_BASE.items()
    ),
    # peft replaces the weights in every forward, and has all experts' factors in one matrix.
    Capability(
        feature="adapters of experts",
        setting="lora.parameters",
        excludes=("model.kernels compile", "model.fp8", "optim.name muon"),
    ),
    Capability(
        feature="master weights and moments in bf16",
        setting="optim.states bf16",
        precisions=("bf16",),
        excludes=("deepspeed.offload_optimizer",),
    ),
    *(
        Capability(feature=title, setting=f"optim.name {name}", excludes=("optim.states bf16",))
        for name, title in TITLES.items()
    ),
    Capability(
        feature="layers compiled by torch.compile",
        setting="model.kernels compile",
        stages=(0, 1, 2),
        alternative="use the preset zero2",
    ),
    Capability(
        feature="products in FP8",
        setting="model.fp8",
        stages=(0, 1, 2),
        precisions=("bf16",),
        alternative="use the preset zero2",
    ),
    Capability(
        feature="layers divided over ranks (tensor parallelism)",
        setting="deepspeed.tensor_parallel",
        least="0.19.8",
        stages=(0, 1, 2),
        precisions=("fp32", "bf16"),
        excludes=(
            "model.quantize",
            *(f"lora.{name}" for name in READ_BASE),
            "model.kernels compile",
            "model.fp8",
        ),
        alternative="use the preset zero2, or remove it: stage 3 divides all weights itself",
    ),
    Capability(feature="fp16 with a dynamic loss scale", setting="", precisions=("fp16",)),
    Capability(feature="weights created and loaded in shards", setting="", stages=(3,)),
    *(
        Capability(feature=text, setting=f"{RAW}fp16.{key}", kind=int, precisions=("fp16",))
        for key, text in {
            "initial_scale_power": "first loss scale, as a power of 2",
            "loss_scale_window": "steps after which the loss scale doubles",
        }.items()
    ),
    Capability(
        feature="communication during computation",
        setting=f"{RAW}zero_optimization.overlap_comm",
        kind=bool,
        stages=(1, 2, 3),
    ),
    Capability(
        feature="gradients copied into buckets",
        setting=f"{RAW}zero_optimization.contiguous_gradients",
        kind=bool,
        least="0.19.8",
        stages=(1, 2),
        excludes=("deepspeed.offload_optimizer",),
    ),
    *(
        Capability(feature=text, setting=f"{RAW}zero_optimization.{key}", kind=int, stages=(3,))
        for key, text in {
            "sub_group_size": "elements that are updated at once",
            "stage3_prefetch_bucket_size": "elements that are gathered ahead",
            "stage3_max_reuse_distance": "number of elements until the next use up to which a "
            "weight stays gathered",
        }.items()
    ),
)


def check_version(version: str) -> None:
    """Raise RLHFError for a DeepSpeed that this backend does not work with."""
    least = LEAST.removesuffix(".0")
    if older(version, LEAST):
        fault = "it loses gradients at stage 2 with the optimizer on the CPU"
        problem = f"deepspeed {version} is too old: {fault}"
    elif not older(version, BEFORE):
        fault = f"this backend patches internals of deepspeed {least}"
        problem = f"deepspeed {version} is too new: {fault}"
    else:
        return
    raise RLHFError(f"{problem}; run pip install 'deepspeed>={least},<{BEFORE}'")


def check_capabilities(
    settings: Collection[str], *, stage: int | str, precision: str, version: str
) -> None:
    """Raise RLHFError for the first of `settings` that cannot be combined with the rest."""
    for row in CAPABILITIES:
        if row.setting not in settings:
            continue
        if older(version, row.least):
            raise RLHFError(
                f"{row.setting} needs deepspeed {row.least}, but {version} is installed; run pip "
                f"install 'deepspeed>={row.least},<{BEFORE}'"
            )
        if precision not in row.precisions:
            raise RLHFError(
                f"{row.setting} needs model.dtype {' or '.join(row.precisions)}; set model.dtype, "
                "or remove it"
            )
        if row.needs and row.needs not in settings:
            raise RLHFError(f"{row.setting} needs {row.needs}; set both, or remove it")
        if clash := [other for other in row.excludes if other in settings]:
            raise RLHFError(
                f"{row.setting} cannot be combined with {clash[0]}; remove one of the two"
            )
        if not row.works_at(stage):
            first, last = row.stages[0], row.stages[-1]
            where = f"stage {first}" if first == last else f"stages {first} to {last}"
            raise RLHFError(
                f"{row.setting} works only at ZeRO {where}, not at stage {stage}; "
                f"{row.alternative or 'remove it'}"
            )


def check_sums(settings: Mapping[str, Any], *, stage: int, version: str) -> None:
    """Raise RLHFError for `settings` of a plan, which an extension may have changed, with which
    DeepSpeed sums gradients incorrectly: 0.19.0 does on two ranks, 0.19.8 does not."""
    one_by_one = settings["zero_optimization"].get("contiguous_gradients") is False
    if stage in (1, 2) and one_by_one and older(version, "0.19.8"):
        raise RLHFError(
            f"zero_optimization.contiguous_gradients is false, but deepspeed {version} then sums "
            f"gradients incorrectly at stage {stage}; set it to true, or run pip install "
            "'deepspeed>=0.19.8,<0.20'"
        )


def stages_for(settings: Collection[str]) -> tuple[int, ...]:
    """Return the stages at which all of `settings` work: those that `stage: auto` chooses from."""
    rows = [row for row in CAPABILITIES if row.setting in settings]
    return tuple(stage for stage in range(4) if all(stage in row.stages for row in rows))
