"""From the configuration to DeepSpeed's: the stage, and why."""

from typing import Any

from attrs import evolve

from rlhf.engine import GIB, Mesh, ModelShape, gib
from rlhf.errors import RLHFError, counted
from rlhf.plugin import Config
from rlhf_plugin_deepspeed.capabilities import stages_for
from rlhf_plugin_deepspeed.config import DeepSpeedConfig, Resolved, overlay, resolve, settings_of
from rlhf_plugin_deepspeed.memory import states
from rlhf_plugin_deepspeed.optimizer import title
from rlhf_plugin_deepspeed.patches.table import NEWEST, names_for
from rlhf_plugin_deepspeed.plans import ZeroPlan
from rlhf_plugin_deepspeed.versions import installed_version, older

SHARE = 0.6
"""Share of the accelerator's memory for the states, where a step could not be rehearsed."""
BUCKET = 200_000_000
"""Elements that are reduced or gathered at once."""
LEAST_BUCKET = 50_000_000
"""Elements that are reduced at once during backward, or those of a mean layer if they are more, up
to BUCKET. At 1.5B as fast as BUCKET, in less memory."""
SUB_GROUPS = 32
"""Number of parts of about the same size of which `deepspeed.offload_ratio` leaves some on the
accelerator; large parameters make fewer."""


def plan(config: Config, mesh: Mesh, shape: ModelShape, *, occupied: int = 0) -> ZeroPlan:
    """Return the plan of a trained model; others take `occupied` bytes of each accelerator."""
    resolved = resolve(config.backend_section)
    stage, why = resolved.stage, ""
    if stage == "auto":
        stage, why = _choose_stage(config, resolved, shape, mesh, occupied)
    assert isinstance(stage, int)
    resolved, optimizer = evolve(resolved, stage=stage), title(config.optim)
    check_fp32(config, resolved, shape)
    made = plan_at(config, mesh, shape, resolved, why=why, trained=optimizer)
    skips = resolved.offload_optimizer and config.backend_section.offload_states == "always"
    more = ", so that offload_states is skipped" if skips else ""
    return evolve(made, summary=made.summary + more + restricted(config))


def check_fp32(config: Config, resolved: Resolved, shape: ModelShape) -> None:
    """Raise RLHFError for a setting with which DeepSpeed trains all weights in one dtype, if some
    of them stay in fp32."""
    if config.model.dtype == "fp32" or not shape.fp32_trainable:
        return
    settings = settings_of(config, resolved)
    for name in ("deepspeed.offload_param", "deepspeed.nvme_path", "optim.states bf16"):
        if name in settings:
            raise RLHFError(
                f"{name} cannot be combined with trained weights that transformers keeps in fp32, "
                f"which model.path {config.model.path} has; remove it, or a preset that sets it, "
                "or train an adapter with lora"
            )


def plan_at(
    config: Config,
    mesh: Mesh,
    shape: ModelShape,
    resolved: Resolved,
    *,
    why: str = "",
    trained: str = "",
) -> ZeroPlan:
    """Return the plan at the stage of `resolved`, for the reason `why`. `trained` is the name of
    the optimizer, empty for a frozen model."""
    section: DeepSpeedConfig = config.backend_section
    stage, precision = resolved.stage, config.model.dtype
    assert isinstance(stage, int)
    rounded = bool(trained) and config.optim.states == "bf16"
    patches = names_for(config, resolved)
    settings = {
        # The loop owns micro-batches and accumulation; DeepSpeed only multiplies these.
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": config.optim.clip,
        "steps_per_print": 2**62,
        # They wait for the device before every forward and in every step.
        "timers": {"throughput": {"enabled": False}},
        "zero_force_ds_cpu_optimizer": False,
        # DeepSpeed only knows its own and torch's AdamW; an extension may bring another.
        "zero_allow_untested_optimizer": True,
        "zero_optimization": _zero(stage, section, resolved, shape, mesh)
        | ({"memory_efficient_linear": False} if "linear" in patches else {}),
        **_precision(precision, stage=stage, rounded=rounded),
    }
    tensor = 1 if shape.tensor % mesh.tensor.size else mesh.tensor.size
    second = settings["zero_optimization"].get("zero_hpz_partition_size")
    copies = f"a second copy of the weights over {second} ranks" if second else ""
    parts = (f"ZeRO {stage}{f' ({why})' if why else ''}", precision, _ranks(mesh), copies, trained)
    return ZeroPlan(
        stage=stage,
        tensor=tensor,
        precision=precision,
        settings=overlay(settings, section.config),
        offload_states="never" if resolved.offload_optimizer else section.offload_states,
        summary=", ".join(filter(None, parts)) + offloads(resolved, section),
        patches=patches,
    )


def _ranks(mesh: Mesh) -> str:
    """Return the number of ranks, with the sizes of the axes if there are several."""
    ranks = counted(mesh.shards.size * mesh.tensor.size, "rank")
    others = {"sequence": mesh.sequence.size, "tensor": mesh.tensor.size}
    more = "".join(f" x {name} {each}" for name, each in others.items() if each > 1)
    return f"{ranks} (data {mesh.data.size}{more})" if more else ranks


def offloads(resolved: Resolved, section: DeepSpeedConfig) -> str:
    """Return what is not on the accelerators, for the end of a summary or a name."""
    names = ["optimizer"] * resolved.offload_optimizer + ["parameters"] * resolved.offload_param
    if section.offload_ratio < 1 and names:
        names = [*names[1:], f"{100 * section.offload_ratio:.3g} % of the optimizer"]
    place = "the CPU" if section.nvme_path is None else "NVMe"
    return f", {' and '.join(names)} on {place}" if names else ""


def restricted(config: Config) -> str:
    """Return how the patches are restricted, for the end of a summary."""
    section: DeepSpeedConfig = config.backend_section
    version = installed_version()
    if older(NEWEST, version):
        return f", correctness patches only (deepspeed {version} is newer than {NEWEST})"
    return ", correctness patches only" if section.patches == "correctness" else ""


def _choose_stage(
    config: Config, resolved: Resolved, shape: ModelShape, mesh: Mesh, occupied: int
) -> tuple[int, str]:
    allowed = stages_for(settings_of(config, resolved))
    if not mesh.memory:
        return allowed[0], "the device's memory is unknown"
    room = SHARE * mesh.memory - occupied
    needed, gathered = dict[int, int](), 2 * shape.largest_layer
    for each in allowed:
        zero = _zero(each, config.backend_section, resolved, shape, mesh)
        parts = states(config, shape, zero, world=mesh.shards.size, gathered=gathered)
        needed[each] = sum(parts.values())
    budget = f"{SHARE:.0%} of {mesh.memory / GIB:.1f} GiB"
    if occupied:
        budget += f" less {gib(occupied)} GiB of other models"
    for stage, size in needed.items():
        if size <= room:
            return stage, f"the first whose states fit: {size / GIB:.2f} GiB in {budget}"
    least = min(allowed, key=needed.__getitem__)
    return (
        least,
        f"no stage fits: {needed[least] / GIB:.1f} GiB of states, {budget}; offload or add ranks",
    )


def _zero(
    stage: int, section: DeepSpeedConfig, resolved: Resolved, shape: ModelShape, mesh: Mesh
) -> dict[str, Any]:
    during_backward = stage in (1, 2) and mesh.shards.size > 1 and not resolved.offload_optimizer
    layer = min(max(shape.mean_layer, LEAST_BUCKET), BUCKET)
    reduced, gathered = (
        section.bucket_size or min(most, max(shape.trainable, 1))
        for most in (layer if during_backward else BUCKET, BUCKET)
    )
    # NCCL's alignment of half-precision buckets, which DeepSpeed asserts.
    reduced, gathered = reduced + reduced % 2, gathered + gathered % 2
    zero: dict[str, Any] = {"stage": stage}
    if stage >= 1:
        zero |= {"reduce_bucket_size": reduced, "allgather_bucket_size": gathered}
        zero["reduce_scatter"] = True
    if stage == 3:
        zero |= {"stage3_prefetch_bucket_size": min(50_000_000, gathered)}
        if section.persistence_threshold is not None:
            zero["stage3_param_persistence_threshold"] = section.persistence_threshold
        if section.hpz_partition_size > 1 and not resolved.offload_param:
            zero["zero_hpz_partition_size"] = section.hpz_partition_size
    host: dict[str, Any] = {"device": "cpu", "pin_memory": mesh.device.type != "cpu"}
    if section.nvme_path is not None:
        # DeepSpeed reads it for the device nvme only.
        host["nvme_path"] = section.nvme_path
    if during_backward:
        zero["overlap_comm"] = True
    if resolved.offload_optimizer:
        zero["offload_optimizer"] = dict(host)
        if section.offload_ratio < 1:
            zero["offload_optimizer"]["ratio"] = section.offload_ratio
            zero["sub_group_size"] = max(shape.trainable // mesh.shards.size // SUB_GROUPS, 1)
    if resolved.offload_param:
        zero["offload_param"] = dict(host)
    return zero


def _precision(precision: str, *, stage: int, rounded: bool) -> dict[str, Any]:
    # Without shards and masters DeepSpeed only has to add up gradients, as in fp32.
    enabled = precision == "bf16" and not (rounded and stage == 0)
    bf16: dict[str, Any] = {"enabled": enabled, "check_grad_overflow": True}
    if rounded and enabled:
        bf16 |= {"bf16_master_weights_and_grads": True, "bf16_optimizer_states": True}
    return {
        "bf16": bf16,
        # The scale starts at 2^16 and grows after 1000 good steps; auto_cast would also cast
        # floats that are not activations.
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
