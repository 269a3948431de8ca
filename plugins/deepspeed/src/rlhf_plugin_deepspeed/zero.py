"""From the configuration to DeepSpeed's own: the stage, and why."""

from typing import Any

from attrs import evolve

from rlhf.config.sections import Config
from rlhf.engine import GIB, Mesh, ModelShape, Plan, gib
from rlhf_plugin_deepspeed.capabilities import stages_for
from rlhf_plugin_deepspeed.config import DeepSpeedConfig, Resolved, resolve, settings_of
from rlhf_plugin_deepspeed.memory import bytes_per_parameter, states

SHARE = 0.6
"""What the states may take of the accelerator's memory; the rest is for activations and buffers."""
BUCKET = 200_000_000
"""Elements that are reduced or gathered at once."""
FEWEST = 50_000_000
"""Elements that are reduced at once where backward goes on meanwhile, at least: those of a mean
layer, up to BUCKET, if they are more, so that a layer's weights mostly fit. At 1.5B as fast as with
BUCKET, in less memory."""


def plan(config: Config, mesh: Mesh, shape: ModelShape, *, optimizer: str, reason: str) -> Plan:
    """The plan for a model of `shape` on the accelerators of `mesh`, with the named optimizer."""
    section: DeepSpeedConfig = config.backend_section
    resolved = resolve(section)
    precision = config.model.dtype
    stage, why = resolved.stage, "as asked"
    if stage == "auto":
        stage, why = _choose_stage(config, resolved, shape, mesh)
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
        # It would wait for the device before every forward and in every step.
        "timers": {"throughput": {"enabled": False}},
        "zero_force_ds_cpu_optimizer": False,
        # It knows AdamW's own classes alone; ours over bf16 states is another.
        "zero_allow_untested_optimizer": config.optim.states == "bf16",
        "zero_optimization": _zero(stage, section, resolved, shape, mesh),
        **_precision(precision, stage=stage, rounded=config.optim.states == "bf16"),
    }
    return Plan(
        stage=stage,
        precision=precision,
        settings=settings,
        summary=summary,
        lighter=_lighter(config, resolved, shape, mesh, stage=stage),
    )


def _lighter(
    config: Config, resolved: Resolved, shape: ModelShape, mesh: Mesh, *, stage: int
) -> tuple[str, ...]:
    """Higher stages, states in bf16 and the optimizer on the CPU, where they take less than `stage`
    does."""
    own = _needed(config, resolved, shape, mesh, stage)
    section = config.backend_section
    # What is named goes with what the section says already.
    offload = "_offload" * resolved.offload_optimizer
    form = "deepspeed.stage {}" if section.preset == "auto" else "deepspeed.preset zero{}" + offload
    found = [
        (form.format(higher), _needed(config, resolved, shape, mesh, higher))
        for higher in _allowed(config, resolved)
        if higher > stage
    ]
    above, here = max(stage, 1), not resolved.offload_optimizer
    if config.model.dtype == "bf16" and here:
        rounded = evolve(config, optim=evolve(config.optim, states="bf16"))
        found.append(("optim.states bf16", _needed(rounded, resolved, shape, mesh, stage)))
    if here and not config.model.quantize and config.optim.states == "fp32":
        offloaded = evolve(resolved, offload_optimizer=True)
        name = f"deepspeed.preset zero{above}_offload"
        if section.stage != "auto":
            sharded = f"deepspeed.stage {above} and " * (stage != above)
            name = f"{sharded}deepspeed.offload_optimizer true"
        found.append((name, _needed(config, offloaded, shape, mesh, above)))
    return tuple(
        f"{name} ({gib(size)} GiB of states instead of {gib(own)})"
        for name, size in found
        if size < 0.95 * own
    )


def _choose_stage(
    config: Config, resolved: Resolved, shape: ModelShape, mesh: Mesh
) -> tuple[int, str]:
    allowed = _allowed(config, resolved)
    if not mesh.memory:
        return allowed[0], "the device's memory is not known"
    room = SHARE * mesh.memory
    needed = {stage: _needed(config, resolved, shape, mesh, stage) for stage in allowed}
    budget = f"{SHARE:.0%} of {mesh.memory / GIB:.1f} GiB"
    for stage, size in needed.items():
        if size <= room:
            return stage, f"the first whose states fit: {size / GIB:.2f} GiB in {budget}"
    least = min(allowed, key=needed.__getitem__)
    return (
        least,
        f"no stage fits: {needed[least] / GIB:.1f} GiB of states, {budget}; offload or add ranks",
    )


def _allowed(config: Config, resolved: Resolved) -> tuple[int, ...]:
    """The stages that go with the other settings."""
    return stages_for(settings_of(config, resolved))


def _needed(config: Config, resolved: Resolved, shape: ModelShape, mesh: Mesh, stage: int) -> int:
    """Bytes of states on each accelerator."""
    rounded = config.optim.states == "bf16"
    size = bytes_per_parameter(config.model.dtype, stage=stage, rounded=rounded)
    offloaded = resolved.offload_optimizer
    parts = states(
        shape, size, stage=stage, world=mesh.world, offload_optimizer=offloaded,
        quantized=config.model.quantize is not None,
    )  # fmt: skip
    if resolved.offload_param:
        # What is gathered for a moment is not what stays.
        parts["weights"] = 0
    return sum(parts.values())


def _zero(
    stage: int, section: DeepSpeedConfig, resolved: Resolved, shape: ModelShape, mesh: Mesh
) -> dict[str, Any]:
    beside = stage in (1, 2) and mesh.world > 1 and not resolved.offload_optimizer
    reduced, gathered = (
        section.bucket_size or min(most, max(shape.trainable, 1))
        for most in (min(max(shape.mean_layer, FEWEST), BUCKET) if beside else BUCKET, BUCKET)
    )
    # NCCL's alignment of half-precision buckets, which DeepSpeed asserts.
    reduced, gathered = reduced + reduced % 2, gathered + gathered % 2
    zero: dict[str, Any] = {"stage": stage}
    if stage >= 1:
        zero |= {"reduce_bucket_size": reduced, "allgather_bucket_size": gathered}
    if stage == 3:
        zero |= {"stage3_prefetch_bucket_size": min(50_000_000, gathered)}
        if section.persistence_threshold is not None:
            zero["stage3_param_persistence_threshold"] = section.persistence_threshold
    host = {"device": "cpu", "pin_memory": mesh.device.type != "cpu"}
    if beside:
        zero["overlap_comm"] = True
    if resolved.offload_optimizer:
        zero["offload_optimizer"] = dict(host)
    if resolved.offload_param:
        zero["offload_param"] = dict(host)
    return zero


def _precision(precision: str, *, stage: int, rounded: bool) -> dict[str, Any]:
    # Without shards and masters there is nothing for DeepSpeed to do between gradients and the
    # optimizer but to add them up, as in fp32.
    own = precision == "bf16" and not (rounded and stage == 0)
    bf16: dict[str, Any] = {"enabled": own, "check_grad_overflow": True}
    if rounded and own:
        bf16 |= {"bf16_master_weights_and_grads": True, "bf16_optimizer_states": True}
    return {
        "bf16": bf16,
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
