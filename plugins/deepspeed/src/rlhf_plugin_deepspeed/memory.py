"""What DeepSpeed keeps on each accelerator (arXiv 1910.02054, section 3), with its buffers."""

from collections.abc import Mapping
from typing import Any

from attrs import frozen

from rlhf.engine import ModelShape, fused_on
from rlhf.plugin import Config
from rlhf_optim import CHUNK
from rlhf_plugin_deepspeed.kinds import STEP_BYTES
from rlhf_plugin_deepspeed.muon import AT_ONCE
from rlhf_plugin_deepspeed.partial import host_share
from rlhf_plugin_deepspeed.plans import ZeroPlan

MOST_LIVE = 1_500_000_000
"""Elements that stage 3 gathers beside the shards: those kept for their next use (DeepSpeed's
`stage3_max_live_parameters`, 1e9), and room for those that the device has not read yet."""
BUCKET = 500_000_000
"""Elements that stage 0 reduces at once."""
NF4 = 0.53
"""Bytes of a weight in 4 bits, with its share of the scales (arXiv 2305.14314, section 3)."""


@frozen(kw_only=True)
class Bytes:
    """Bytes per parameter of the model's states."""

    weight: int
    gradient: int
    master: int
    optimizer: float
    """The optimizer's states, such as AdamW's two moments; Muon's is a mean over its weights."""


def bytes_per_parameter(config: Config, shape: ModelShape, *, stage: int) -> Bytes:
    """Return the bytes of each state. The optimizer's states and the master weights are fp32, or
    bf16 with `optim.states bf16`; in fp32 only a sharded optimizer has separate masters."""
    kept = 4 * shape.num_states(config.optimizer_kind)
    if config.model.dtype == "fp32":
        return Bytes(weight=4, gradient=4, master=0 if stage == 0 else 4, optimizer=kept)
    if config.optim.states == "bf16":
        # The weights are rounded themselves, at stage 3 a copy of them.
        return Bytes(weight=2, gradient=2, master=2 if stage == 3 else 0, optimizer=4)
    return Bytes(weight=2, gradient=2, master=4, optimizer=kept)


def states(
    config: Config, shape: ModelShape, zero: Mapping[str, Any], *, world: int, gathered: int
) -> dict[str, int]:
    """Return the bytes of `weights`, `gradients`, `masters` and `optimizer` on each accelerator
    with DeepSpeed's settings `zero`. Stage 3 keeps `gathered` elements beside the shards."""
    stage, offloaded = zero["stage"], "offload_optimizer" in zero
    size = bytes_per_parameter(config, shape, stage=stage)
    in_fp32 = shape.fp32 * (4 - size.weight)
    weights = shape.parameters * size.weight + in_fp32
    gradients = shape.trainable * size.gradient + shape.fp32_trainable * (4 - size.gradient)
    updated = int((1 - host_share(zero)) * shape.trainable) // (world if stage >= 1 else 1)
    if stage >= 2:
        # With the optimizer on the host, gradients are added up there; masters on the accelerator
        # have theirs beside them.
        gradients = 4 * updated if offloaded else gradients // world
    if stage == 3:
        second = zero.get("zero_hpz_partition_size")
        shards = weights // world + (weights // second if second else 0)
        weights = (0 if "offload_param" in zero else shards) + gathered * size.weight
    if config.model.quantize:
        whole = shape.head + shape.lookup + shape.trainable
        weights = int(size.weight * whole + NF4 * max(shape.parameters - whole, 0)) + in_fp32
    return {
        "weights": weights,
        "gradients": gradients,
        "masters": updated * size.master,
        "optimizer": int(updated * size.optimizer),
    }


def estimate(
    config: Config,
    plan: ZeroPlan,
    shape: ModelShape,
    *,
    world: int,
    trained: bool,
    device: str = "cpu",
) -> Mapping[str, int]:
    """Return what stays on each accelerator, a `device` of this kind, through a step; `updating`
    is what the optimizer's step takes for a moment, `reducing` what the gradients of one
    micro-batch take in backward until they are reduced or added to the others, `host` what each
    rank has in host memory and `nvme` what it has in files."""
    zero: Mapping[str, Any] = plan.settings["zero_optimization"]
    size = bytes_per_parameter(config, shape, stage=plan.stage)
    offloaded, on_host = "offload_optimizer" in zero, "offload_param" in zero
    # On one rank the shards are the weights.
    gathered = min(shape.parameters, MOST_LIVE) if on_host or world > 1 else 0
    parts = states(config, shape, zero, world=world, gathered=gathered)
    parts |= {"host": 0, "nvme": 0}
    place = "host" if config.backend_section.nvme_path is None else "nvme"
    parts[place] = shape.parameters * size.weight // world if on_host else 0
    if not trained:
        return {name: parts[name] for name in ("weights", "host", "nvme")}
    if offloaded:
        updated = host_share(zero) * shape.trainable
        parts[place] += int(updated * (size.master + size.optimizer)) // world
        # Gradients are added up in float32 there; stages 1 and 2 copy updated weights through it.
        through = size.weight if plan.stage < 3 else 0
        parts["host"] += (4 + through) * shape.trainable // world
        if host_share(zero) < 1:
            # At the start all masters and gradients are there, in two precisions.
            at_start = (size.master + 4 + size.weight) * shape.trainable // world
            parts["host"] = max(parts["host"], at_start)
    parts |= _buffers(zero, shape, size, gradients=parts["gradients"])
    if plan.stage == 3:
        # DeepSpeed allocates its share of the gradients at the start, as a buffer.
        del parts["gradients"]
    taken = _updating(config, shape, size, stage=plan.stage, world=world, fused=fused_on(device))
    parts["updating"] = 0 if offloaded else taken
    if config.optim.name == "muon":
        # Parts that are sent and received, and what is computed of the largest matrices.
        at_once = min(shape.trainable, AT_ONCE) // (world if plan.stage else 1)
        parts["updating"] += 2 * size.weight * (at_once + shape.mean_layer)
    return parts


def _buffers(
    zero: Mapping[str, Any], shape: ModelShape, size: Bytes, *, gradients: int
) -> dict[str, int]:
    offloaded = "offload_optimizer" in zero
    bucket = zero.get("reduce_bucket_size", 0) * size.weight
    if zero["stage"] == 3:
        # One bucket is reduced while the next is filled.
        return {"buffers": gradients, "reducing": 2 * bucket}
    buffers = {"buffers": bucket * (2 if zero.get("overlap_comm") else 1)}
    if offloaded:
        # Sums come back from the host through room for the largest parameter, at most a layer.
        buffers["buffers"] += min(shape.largest_layer, shape.trainable) * size.weight
    elif zero["stage"] == 2:
        # The gradients of a micro-batch come beside the sums of earlier ones.
        buffers["reducing"] = gradients
    return buffers


def _updating(
    config: Config, shape: ModelShape, size: Bytes, *, stage: int, world: int, fused: bool
) -> int:
    rounded = config.optim.states == "bf16"
    share = shape.trainable // (world if stage >= 1 else 1)
    # DeepSpeed casts gradients to the masters' fp32, and at stages 1 to 3 flattens them before.
    in_fp32 = 0 if rounded or (config.model.dtype == "fp32" and stage == 0) else 4
    taken = share * (in_fp32 + size.gradient * (stage >= 1))
    if stage == 0 and world > 1:
        # Gradients are reduced in separate buckets, over bf16 states in float32.
        taken += (size.weight + (4 if rounded else 0)) * min(shape.trainable, BUCKET)
    taken += STEP_BYTES.get(config.optim.name, 0) * share
    if rounded and not fused:
        # The update computes in float32, on a part of the weights at a time.
        taken += 28 * min(share, CHUNK)
    return taken
