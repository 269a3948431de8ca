"""The section `deepspeed:`: presets, what they stand for, and the combinations that are refused."""

from typing import Any, Literal

from attrs import field, frozen, validators

from rlhf.errors import RLHFError
from rlhf_plugin_deepspeed.capabilities import check_capabilities, check_version, installed_version

optional = validators.optional
PARALLEL = ("tensor_parallel", "sequence_parallel")


@frozen
class Offload:
    """What a preset stands for."""

    stage: int
    optimizer: bool = False
    parameters: bool = False


PRESETS: dict[str, Offload] = {
    "ddp": Offload(0),
    "zero": Offload(0),
    "zero0": Offload(0),
    "zero1": Offload(1),
    "zero2": Offload(2),
    "zero3": Offload(3),
    "zero1_offload": Offload(1, optimizer=True),
    "zero1_cpuoffload": Offload(1, optimizer=True),
    "zero2_offload": Offload(2, optimizer=True),
    "zero2_cpuoffload": Offload(2, optimizer=True),
    "zero3_offload": Offload(3, optimizer=True, parameters=True),
    "zero3_cpuoffload": Offload(3, optimizer=True, parameters=True),
}


@frozen(kw_only=True)
class DeepSpeedConfig:
    """How the model's states are spread over the ranks (ZeRO, arXiv 1910.02054)."""

    preset: str = field(default="auto", validator=validators.in_(("auto", *PRESETS)))
    """auto, ddp (also zero, zero0), zero1, zero2, zero3, and zero1_offload, zero2_offload
    (optimizer on the CPU), zero3_offload (optimizer and parameters on the CPU); `_cpuoffload` says
    the same as `_offload`."""
    stage: Literal["auto", 0, 1, 2, 3] = "auto"
    """ZeRO stage: 0 shares nothing, 1 shards the optimizer's states, 2 the gradients too, 3 the
    weights too. auto is the preset's, else the smallest whose states fit 60 % of the accelerator's
    memory."""
    offload_optimizer: bool | None = None
    """Optimizer states and step on the CPU (ZeRO-Offload, arXiv 2101.06840), stages 1 to 3;
    default: the preset's."""
    offload_param: bool | None = None
    """Weights on the CPU between uses, stage 3; default: the preset's."""
    tensor_parallel: int = field(default=1, validator=validators.ge(1))
    """Ranks that share each layer; only 1 so far."""
    sequence_parallel: int = field(default=1, validator=validators.ge(1))
    """Ranks that share each sequence; only 1 so far."""
    timeout: float = field(
        default=30.0, validator=validators.and_(validators.gt(0), validators.le(10**6))
    )
    """Minutes a rank waits for the others in a collective before the run fails (DeepSpeed's own
    default is 10)."""
    persistence_threshold: int | None = field(default=None, validator=optional(validators.ge(0)))
    """Stage 3: parameters with at most so many elements stay whole on every rank; DeepSpeed's
    default 100000."""
    bucket_size: int | None = field(default=None, validator=optional(validators.gt(0)))
    """Stages 1 to 3: elements that are reduced or gathered at once; default 2e8, or the model's
    size if smaller. Reduced beside backward: a layer's, 5e7 to 2e8."""


@frozen(kw_only=True)
class Resolved:
    """The section with its preset filled in; `stage` is "auto" until the model's size is known."""

    stage: int | str
    offload_optimizer: bool
    offload_param: bool


def resolve(section: DeepSpeedConfig) -> Resolved:
    """The preset's values where the section says nothing. Raises RLHFError where it contradicts the
    preset."""
    preset = PRESETS.get(section.preset)
    if preset is None:
        stage = 3 if section.offload_param and section.stage == "auto" else section.stage
        return Resolved(
            stage=stage,
            offload_optimizer=bool(section.offload_optimizer),
            offload_param=bool(section.offload_param),
        )
    if section.stage not in ("auto", preset.stage):
        raise RLHFError(
            f"deepspeed.stage is {section.stage} but the preset {section.preset} is stage "
            f"{preset.stage}: give one of the two."
        )
    for name, given in (("optimizer", preset.optimizer), ("parameters", preset.parameters)):
        setting = "offload_optimizer" if name == "optimizer" else "offload_param"
        if given and getattr(section, setting) is False:
            raise RLHFError(
                f"deepspeed.{setting} is false but the preset {section.preset} puts the {name} on "
                f"the CPU: use the preset zero{preset.stage}."
            )
    return Resolved(
        stage=preset.stage,
        offload_optimizer=preset.optimizer or bool(section.offload_optimizer),
        offload_param=preset.parameters or bool(section.offload_param),
    )


def check(config: Any) -> None:
    """Refuse what cannot run or would have no effect, before anything heavy is imported. Raises
    RLHFError."""
    section: DeepSpeedConfig = config.backend_section
    check_version(installed_version())
    for name in PARALLEL:
        if getattr(section, name) > 1:
            raise RLHFError(
                f"deepspeed.{name} is {getattr(section, name)} but this version spreads a model "
                "over ranks by ZeRO alone: set it to 1 and use the preset zero3 for a model that "
                "does not fit one device."
            )
    resolved = resolve(section)
    settings = settings_of(config, resolved)
    check_capabilities(settings, stage=resolved.stage, version=installed_version())


def settings_of(config: Any, resolved: Resolved) -> list[str]:
    """What of `capabilities.CAPABILITIES` the configuration asks for."""
    section: DeepSpeedConfig = config.backend_section
    asked = {
        "deepspeed.offload_optimizer": resolved.offload_optimizer,
        "deepspeed.offload_param": resolved.offload_param,
        "deepspeed.persistence_threshold": section.persistence_threshold is not None,
        "deepspeed.bucket_size": section.bucket_size is not None,
        "model.quantize": config.model.quantize is not None,
        "optim.states": config.optim.states == "bf16",
        "model.kernels compile": config.model.kernels == "compile",
        "model.fp8": config.model.fp8 is not None,
    }
    return [name for name, is_asked in asked.items() if is_asked]
