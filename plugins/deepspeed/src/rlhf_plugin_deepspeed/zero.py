"""From the configuration to DeepSpeed's own: the stage, and why; memory after the ZeRO paper (arXiv
1910.02054)."""

from typing import Any

from attrs import frozen

from rlhf.config.sections import Config
from rlhf.engine import Mesh, ModelShape, Plan
from rlhf_plugin_deepspeed.capabilities import stages_for
from rlhf_plugin_deepspeed.config import DeepSpeedConfig, Resolved, resolve

SHARE = 0.6
"""What the states may take of the accelerator's memory; the rest is for activations and buffers."""
BUCKET = 200_000_000
GIB = 2**30


def plan(
    config: Config, mesh: Mesh, shape: ModelShape, *, memory: int, optimizer: str, reason: str
) -> Plan:
    """The plan for a model of `shape` on accelerators with `memory` bytes each, with the named
    optimizer."""
    section: DeepSpeedConfig = config.backend_section
    resolved = resolve(section)
    precision = config.model.dtype
    stage, why = resolved.stage, "as asked"
    if stage == "auto":
        stage, why = _choose_stage(config, resolved, shape, world=mesh.world, memory=memory)
    assert isinstance(stage, int)
    offloads = [
        name
        for name, is_on in (
            ("optimizer", resolved.offload_optimizer),
            ("parameters", resolved.offload_param),
        )
        if is_on
    ]
    ranks = "1 rank" if mesh.world == 1 else f"{mesh.world} ranks"
    summary = f"ZeRO {stage} ({why}), {precision}, {ranks}, {optimizer}"
    if offloads:
        summary += f", {' and '.join(offloads)} on the CPU"
    if reason:
        summary += f" ({reason})"
    settings = {
        # The loop owns micro-batches and accumulation; DeepSpeed only wants the numbers to
        # multiply.
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": config.optim.clip,
        "steps_per_print": 2**62,
        "zero_force_ds_cpu_optimizer": False,
        "zero_optimization": _zero(
            stage, section, resolved, shape, pinned=mesh.device.type != "cpu"
        ),
        **_precision(precision),
    }
    return Plan(stage=stage, precision=precision, settings=settings, summary=summary)


@frozen(kw_only=True)
class Bytes:
    """Bytes per parameter that the model's states take."""

    weight: int
    gradient: int
    optimizer: int


def bytes_per_parameter(precision: str, *, stage: int) -> Bytes:
    """Adam's two moments and the master weights are fp32; in fp32 only a sharded optimizer has
    masters apart."""
    if precision == "fp32":
        return Bytes(weight=4, gradient=4, optimizer=8 if stage == 0 else 12)
    return Bytes(weight=2, gradient=2, optimizer=12)


def states(
    shape: ModelShape, precision: str, *, stage: int, world: int, offload_optimizer: bool
) -> int:
    """Bytes of weights, gradients and optimizer states on each accelerator."""
    size = bytes_per_parameter(precision, stage=stage)
    weights = shape.parameters * size.weight
    gradients = shape.trainable * size.gradient
    optimizer = 0 if offload_optimizer else shape.trainable * size.optimizer
    if stage >= 1:
        optimizer //= world
    if stage >= 2:
        gradients //= world
    if stage == 3:
        weights = weights // world + 2 * shape.largest_layer * size.weight
    return weights + gradients + optimizer


def _choose_stage(
    config: Config, resolved: Resolved, shape: ModelShape, *, world: int, memory: int
) -> tuple[int, str]:
    settings = {
        "deepspeed.offload_optimizer": resolved.offload_optimizer,
        "deepspeed.bucket_size": config.backend_section.bucket_size is not None,
        "model.quantize": config.model.quantize is not None,
    }
    allowed = stages_for([name for name, is_on in settings.items() if is_on])
    room = SHARE * memory

    def needed(stage: int) -> int:
        return states(
            shape,
            config.model.dtype,
            stage=stage,
            world=world,
            offload_optimizer=resolved.offload_optimizer,
        )

    budget = f"{SHARE:.0%} of {memory / GIB:.1f} GiB"
    for stage in allowed:
        if needed(stage) <= room:
            return stage, f"the first whose states fit: {needed(stage) / GIB:.2f} GiB in {budget}"
    least = min(allowed, key=needed)
    return (
        least,
        f"no stage fits: {needed(least) / GIB:.1f} GiB of states, {budget}; offload or add ranks",
    )


def _zero(
    stage: int, section: DeepSpeedConfig, resolved: Resolved, shape: ModelShape, *, pinned: bool
) -> dict[str, Any]:
    bucket = section.bucket_size or min(BUCKET, max(shape.trainable, 1))
    zero: dict[str, Any] = {"stage": stage}
    if stage >= 1:
        zero |= {"reduce_bucket_size": bucket, "allgather_bucket_size": bucket}
    if stage == 3:
        zero |= {"stage3_prefetch_bucket_size": min(50_000_000, bucket)}
        if section.persistence_threshold is not None:
            zero["stage3_param_persistence_threshold"] = section.persistence_threshold
    host = {"device": "cpu", "pin_memory": pinned}
    if resolved.offload_optimizer:
        zero["offload_optimizer"] = dict(host)
    if resolved.offload_param:
        zero["offload_param"] = dict(host)
    return zero


def _precision(precision: str) -> dict[str, Any]:
    return {
        "bf16": {"enabled": precision == "bf16", "check_grad_overflow": True},
        # A scale that starts at 2^16 and grows after 1000 good steps; auto_cast would cast token
        # ids' floats too.
        "fp16": {
            "enabled": precision == "fp16",
            "auto_cast": False,
            "loss_scale": 0,
            "initial_scale_power": 16,
            "loss_scale_window": 1000,
            "hysteresis": 1,
            "min_loss_scale": 1,
        },
    }
