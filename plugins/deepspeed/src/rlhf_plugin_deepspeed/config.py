"""The section `deepspeed:`: presets, what they set, and the combinations that are refused."""

import difflib
from collections.abc import Mapping
from typing import Any, ClassVar, Literal

from attrs import field, frozen, validators

from rlhf.errors import RLHFError
from rlhf_plugin_deepspeed.capabilities import check_capabilities, check_version
from rlhf_plugin_deepspeed.versions import installed_version

optional = validators.optional


@frozen(kw_only=True)
class Resolved:
    """What a preset sets, and the section with its preset filled in; `stage` is "auto" until the
    model's size is known."""

    stage: int | str
    offload_optimizer: bool = False
    offload_param: bool = False


PRESETS = {
    "ddp": Resolved(stage=0),
    "zero": Resolved(stage=0),
    **{f"zero{stage}": Resolved(stage=stage) for stage in range(4)},
    **{
        f"zero{stage}_{spelling}": Resolved(
            stage=stage, offload_optimizer=True, offload_param=stage == 3
        )
        for stage in (1, 2, 3)
        for spelling in ("offload", "cpuoffload")
    },
}


def known_preset(section: object, attribute: object, value: str) -> None:
    """Raise ValueError unless `value` is a preset or auto."""
    names = ("auto", *PRESETS)
    if value not in names:
        near = difflib.get_close_matches(value, names, n=1)
        hint = f"; did you mean {near[0]}?" if near else f"; available: {', '.join(names)}"
        raise ValueError(f"unknown preset {value}{hint}")


@frozen(kw_only=True)
class DeepSpeedConfig:
    """How the model's states are spread over the ranks (ZeRO, arXiv 1910.02054)."""

    removed_settings: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        "tensor_parallel": (1,),
        "sequence_parallel": (1,),
    }
    preset: str = field(default="auto", validator=known_preset)
    """auto, ddp (also zero, zero0), zero1, zero2, zero3, and zero1_offload, zero2_offload
    (optimizer on the CPU), zero3_offload (optimizer and parameters on the CPU); `_cpuoffload` is
    another spelling of `_offload`."""
    stage: Literal["auto", 0, 1, 2, 3] = "auto"
    """ZeRO stage: 0 shards nothing, 1 the optimizer's states, 2 also the gradients, 3 also the
    weights. auto is the preset's, else the smallest whose states fit 60 % of the accelerator's
    memory."""
    offload_optimizer: bool | None = None
    """Optimizer states and step on the CPU (ZeRO-Offload, arXiv 2101.06840), stages 1 to 3;
    default: the preset's."""
    offload_param: bool | None = None
    """Weights on the CPU between uses, stage 3; default: the preset's."""
    timeout: float = field(
        default=30.0, validator=validators.and_(validators.gt(0), validators.le(10**6))
    )
    """Minutes a rank waits for the others in a collective before the run fails (DeepSpeed's own
    default is 10)."""
    persistence_threshold: int | None = field(default=None, validator=optional(validators.ge(0)))
    """Stage 3: parameters with at most this many elements stay whole on every rank; DeepSpeed's
    default is 100000."""
    bucket_size: int | None = field(default=None, validator=optional(validators.gt(0)))
    """Stages 1 to 3: elements that are reduced or gathered at once; default 2e8, or the model's
    size if smaller. Reductions during backward: the size of a layer, 5e7 to 2e8."""
    patches: Literal["all", "correctness"] = "all"
    """Which patches of DeepSpeed are installed: all of docs/backends.md, or only those that correct
    results need. A DeepSpeed newer than the tested ones gets only those."""


def resolve(section: DeepSpeedConfig) -> Resolved:
    """Return the section with the preset's values where it sets none. Raises RLHFError where it
    contradicts the preset."""
    preset = PRESETS.get(section.preset)
    if preset is None:
        preset = Resolved(
            stage=3 if section.offload_param and section.stage == "auto" else section.stage
        )
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
    )


def check(config: Any) -> None:
    """Refuse what cannot run or would have no effect, before anything heavy is imported. Raises
    RLHFError."""
    check_version(installed_version())
    resolved = resolve(config.backend_section)
    check_capabilities(settings_of(config, resolved), stage=resolved.stage)


def settings_of(config: Any, resolved: Resolved) -> list[str]:
    """Return the settings of `capabilities.CAPABILITIES` that the configuration turns on."""
    section: DeepSpeedConfig = config.backend_section
    settings = {
        "deepspeed.offload_optimizer": resolved.offload_optimizer,
        "deepspeed.offload_param": resolved.offload_param,
        "deepspeed.persistence_threshold": section.persistence_threshold is not None,
        "deepspeed.bucket_size": section.bucket_size is not None,
        "model.quantize": config.model.quantize is not None,
        "optim.states": config.optim.states == "bf16",
        "model.kernels compile": config.model.kernels == "compile",
        "model.fp8": config.model.fp8 is not None,
    }
    return [name for name, is_on in settings.items() if is_on]
