"""What this backend can do, at which ZeRO stages and from which DeepSpeed version on: one table for
the config's checks and for docs/backends.md."""

import re
from collections.abc import Collection, Mapping
from importlib import metadata
from typing import Any

from attrs import frozen

from rlhf.errors import RLHFError

LEAST = "0.19.0"
PRECISIONS = ("fp32", "bf16", "fp16")
STAGES = (0, 1, 2, 3)


@frozen(kw_only=True)
class Capability:
    """One row: a feature and where it holds."""

    feature: str
    setting: str
    """The key that asks for it, or "" where it is always there."""
    least: str = LEAST
    """Least DeepSpeed version."""
    stages: tuple[int, ...] = STAGES
    precisions: tuple[str, ...] = PRECISIONS
    """Those that core's configuration lets it have."""
    excludes: tuple[str, ...] = ()
    """Settings that it does not go with."""
    optional_stage: bool = False
    """Whether `stage: auto` picks a stage where it holds, if that is not every one."""
    alternative: str = ""
    """What to do at another stage, as the end of an error's sentence."""

    def holds_at(self, stage: int | str) -> bool:
        """Whether it acts at a stage, or at the one that `auto` picks."""
        if stage == "auto":
            return self.optional_stage or self.stages == STAGES
        return stage in self.stages


CAPABILITIES = (
    Capability(feature="ZeRO", setting="deepspeed.stage"),
    Capability(
        feature="optimizer on the CPU",
        setting="deepspeed.offload_optimizer",
        stages=(1, 2, 3),
        optional_stage=True,
        alternative="drop it or use the preset zero1_offload",
    ),
    Capability(
        feature="parameters on the CPU",
        setting="deepspeed.offload_param",
        stages=(3,),
        optional_stage=True,
        excludes=("model.quantize",),
        alternative="drop it or use the preset zero3_offload",
    ),
    Capability(
        feature="small parameters kept whole",
        setting="deepspeed.persistence_threshold",
        stages=(3,),
        alternative="drop it or set deepspeed.stage to 3",
    ),
    Capability(
        feature="size of reduced and gathered buckets",
        setting="deepspeed.bucket_size",
        stages=(1, 2, 3),
        optional_stage=True,
        alternative="drop it or use the preset zero1",
    ),
    Capability(
        feature="4-bit base under LoRA",
        setting="model.quantize",
        stages=(0, 1, 2),
        precisions=("fp32", "bf16"),
        excludes=("deepspeed.offload_param",),
        optional_stage=True,
        alternative="use the preset zero2, which shards what the adapter trains",
    ),
    Capability(
        feature="master weights and moments in bf16",
        setting="optim.states",
        precisions=("bf16",),
        excludes=("deepspeed.offload_optimizer",),
    ),
    Capability(
        feature="layers compiled by torch.compile",
        setting="model.kernels compile",
        stages=(0, 1, 2),
        optional_stage=True,
        alternative="use the preset zero2",
    ),
    Capability(
        feature="products in FP8",
        setting="model.fp8",
        stages=(0, 1, 2),
        precisions=("bf16",),
        optional_stage=True,
        alternative="use the preset zero2",
    ),
    Capability(feature="fp16 with a dynamic loss scale", setting="", precisions=("fp16",)),
    Capability(feature="weights created and loaded in shards", setting="", stages=(3,)),
)


def installed_version() -> str:
    """DeepSpeed's version from its metadata, without importing it."""
    return metadata.version("deepspeed")


def check_version(version: str) -> None:
    """Raise RLHFError for a DeepSpeed older than this backend needs."""
    if older(version, LEAST):
        raise RLHFError(
            f"deepspeed {version} is installed but {LEAST} is the least that trains right (0.18 "
            "loses gradients at ZeRO-2 with the optimizer on the CPU): run pip install -U "
            "deepspeed."
        )


def check_capabilities(settings: Collection[str], *, stage: int | str, version: str) -> None:
    """Raise RLHFError for the first of `settings` that has no effect at `stage` or with
    `version`."""
    for row in CAPABILITIES:
        if row.setting not in settings:
            continue
        if older(version, row.least):
            raise RLHFError(
                f"{row.setting} needs deepspeed {row.least} or newer but {version} is installed: "
                "run pip install -U deepspeed."
            )
        for other in row.excludes:
            if other in settings:
                raise RLHFError(f"{row.setting} does not go with {other}: drop one of the two.")
        if not row.holds_at(stage):
            raise RLHFError(
                f"{row.setting} has no effect at ZeRO stage {stage}: it acts at "
                f"{_listed(row.stages)} alone, so {row.alternative}."
            )


def check_sums(settings: Mapping[str, Any], *, stage: int, version: str) -> None:
    """Refuse a plan's `settings`, which an extension may have changed, where DeepSpeed adds up
    gradients wrongly: on two ranks 0.19.0 does, 0.19.8 does not. Raises RLHFError."""
    apart = settings["zero_optimization"].get("contiguous_gradients") is False
    if stage in (1, 2) and apart and older(version, "0.19.8"):
        raise RLHFError(
            f"zero_optimization.contiguous_gradients is false, with which DeepSpeed {version} adds "
            f"up gradients wrongly at stage {stage}: leave it true or pip install "
            "'deepspeed>=0.19.8'."
        )


def stages_for(settings: Collection[str]) -> tuple[int, ...]:
    """The stages at which all of `settings` act: what `stage: auto` may choose from."""
    rows = [row for row in CAPABILITIES if row.setting in settings]
    return tuple(stage for stage in range(4) if all(stage in row.stages for row in rows))


def table() -> str:
    """The capabilities as a Markdown table."""
    lines = [
        "| feature | setting | deepspeed | stages | precisions | not with |",
        "|---|---|---|---|---|---|",
    ]
    for row in CAPABILITIES:
        cells = (
            row.feature,
            f"`{row.setting}`" if row.setting else "",
            f">= {row.least}",
            ", ".join(map(str, row.stages)),
            ", ".join(row.precisions),
            ", ".join(f"`{name}`" for name in row.excludes),
        )
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def older(version: str, than: str) -> bool:
    """Whether a version is older than another one, by number: 0.19.10 is newer than 0.19.9."""
    return _numbers(version) < _numbers(than)


def _numbers(version: str) -> tuple[int, ...]:
    found = re.match(r"\d+(?:\.\d+)*", version)
    numbers = tuple(int(part) for part in found.group().split(".")) if found else ()
    return numbers + (0,) * (3 - len(numbers))


def _listed(stages: tuple[int, ...]) -> str:
    if len(stages) == 1:
        return f"stage {stages[0]}"
    return f"stages {stages[0]} to {stages[-1]}"
