"""One table of every patch of DeepSpeed: what it replaces, when, why, and what it gained."""

from typing import Literal

from attrs import frozen

from rlhf.plugin import Config
from rlhf_plugin_deepspeed.config import Resolved
from rlhf_plugin_deepspeed.versions import installed_version, older

OLDEST, NEWEST = "0.19.0", "0.19.8"
"""The tested range of DeepSpeed versions."""


@frozen(kw_only=True)
class Patch:
    """A change of DeepSpeed's behaviour."""

    targets: tuple[str, ...]
    """What is replaced, set or read, `module:Class.attribute(parameters)`; a parameter with `=` may
    be missing. A private name is written as in DeepSpeed's source. A patch of a module or a class
    is undone by `close_mesh`; one of an engine's object ends with it."""
    stages: tuple[int, ...]
    kind: Literal["correctness", "speed"]
    states: Literal["any", "fp32", "bf16"] = "any"
    """Only with this `optim.states`."""
    offload: bool = True
    """Whether it applies with the optimizer on the CPU too."""
    oldest: str = OLDEST
    """The first DeepSpeed that it is for."""
    reason: str
    gain: str = ""
    """As measured; see benchmarks/NOTES.md."""


ZERO = "deepspeed.runtime.zero"
STAGES_1_2 = f"{ZERO}.stage_1_and_2:DeepSpeedZeroOptimizer"
STAGE_3 = f"{ZERO}.stage3:DeepSpeedZeroOptimizer_Stage3"
SEQUENCE = "deepspeed.runtime.sequence_parallel.parallel_state_sp"

PATCHES = {
    "fresh-groups": Patch(
        targets=(
            "deepspeed.comm.comm:cdb",
            *(f"deepspeed.utils.groups:{name}" for name in (
                "mpu", "mesh_device", "_WORLD_GROUP", "_DATA_PARALLEL_GROUP",
                "_MODEL_PARALLEL_GROUP", "_TENSOR_MODEL_PARALLEL_GROUP",
                "_MPU_TENSOR_MODEL_PARALLEL_WORLD_SIZE", "_MPU_TENSOR_MODEL_PARALLEL_RANK",
                "_ZERO_PARAM_INTRA_PARALLEL_GROUP",
            )),
            f"{SEQUENCE}:_SEQUENCE_PARALLEL_GROUP",
            f"{SEQUENCE}:_SEQUENCE_DATA_PARALLEL_GROUP",
        ),
        stages=(0, 1, 2, 3), kind="correctness",
        reason="each run in a process has process groups and axes of its own, with its timeout",
    ),
    "fresh-modules": Patch(
        targets=(
            f"{ZERO}.parameter_offload:FWD_MODULE_STACK",
            f"{ZERO}.partitioned_param_coordinator:PartitionedParameterCoordinator."
            "__params_to_release(submodule_to_release, step_id)",
        ),
        stages=(0, 1, 2, 3), kind="correctness",
        reason="weights and process groups of a run that has ended are freed; DeepSpeed keeps "
        "modules in variables of the process",
    ),
    "no-shm-build": Patch(
        targets=("deepspeed.comm.torch:build_shm_op()",),
        stages=(0, 1, 2, 3), kind="correctness",
        reason="DeepSpeed compiles CPU collectives that only its inference uses; if that is "
        "interrupted, a lock remains for which all later runs wait",
        gain="24 to 54 s at the first start on a CPU",
    ),
    "no-ranges": Patch(
        targets=("deepspeed.utils.nvtx:enable_nvtx",),
        stages=(0, 1, 2, 3), kind="speed",
        reason="DeepSpeed marks its functions as ranges for NVIDIA's profiler, which costs time",
        gain="452 -> 386 ms a step at stage 3 on two GPUs with a slow CPU (1.5B, one run of each)",
    ),
    "no-passes": Patch(
        targets=("deepspeed.runtime.engine:is_deepcompile_supported()",),
        stages=(0, 1, 2, 3), kind="speed",
        reason="DeepSpeed imports torch's compiler to register passes of DeepCompile, which no run "
        "uses",
        gain="1.1 -> 0.1 s for the engine at stage 0 (means on two H100 hosts)",
    ),
    "scaler-floor": Patch(
        targets=("deepspeed.runtime.fp16.loss_scaler:DynamicLossScaler.raise_error_at_min_scale",),
        stages=(0, 1, 2, 3), kind="correctness",
        reason="at the smallest loss scale DeepSpeed raises a bare Exception; the loop reports "
        "step and rows",
    ),
    "check-every-precision": Patch(
        targets=(f"{STAGES_1_2}.check_grad_overflow",),
        stages=(1, 2), kind="correctness", states="fp32",
        reason="a gradient that is not finite skips the step in fp32 and bf16 too",
    ),
    "check-by-norm": Patch(
        targets=(
            f"{STAGES_1_2}.check_overflow(partition_gradients)",
            f"{STAGES_1_2}.scaled_global_norm(norm_type)",
        ),
        stages=(1, 2), kind="speed", states="fp32", offload=False, oldest="0.19.8",
        reason="the norm shows whether any gradient is not finite; DeepSpeed also checks each "
        "gradient",
        gain="190 -> 168 ms a step on one GPU (0.5B)",
    ),
    "gradient-order": Patch(
        targets=(
            f"{STAGES_1_2}.reduce_ready_partitions_and_remove_grads(param, i)",
            f"{STAGES_1_2}.average_tensor(tensor, communication_data_type)",
            f"{STAGES_1_2}.independent_gradient_partition_epilogue()",
            f"{STAGES_1_2}.reduce_ipg_grads(comm_dtype=)",
            f"{STAGES_1_2}.reduce_independent_p_g_buckets_and_remove_grads(param, i)",
            f"{STAGES_1_2}.overlap_comm",
        ),
        stages=(1, 2), kind="correctness",
        reason="sums in one order on all ranks; DeepSpeed reduces in the order of arrival, and "
        "stage 1 loses gradients of earlier micro-batches",
        gain="stage 1: 0.957 -> 0.981 of linear scaling on four GPUs",
    ),
    "no-master-copy": Patch(
        targets=(
            f"{STAGES_1_2}.single_partition_of_fp32_groups",
            f"{STAGES_1_2}._link_all_hp_params()",
            f"{STAGES_1_2}._get_groups_without_padding(groups_with_padding)",
        ),
        stages=(1, 2), kind="speed", states="bf16",
        reason="bf16 states update the weights themselves; DeepSpeed keeps a copy",
        gain="51.1 -> 48.3 GiB on one GPU",
    ),
    "linear": Patch(
        targets=("torch.nn.functional:linear",),
        stages=(3,), kind="speed",
        reason="like DeepSpeed's `memory_efficient_linear`, it keeps no gathered weight for "
        "backward; it also keeps no input of a frozen layer. With `patches: correctness`, "
        "DeepSpeed's is installed for the length of the run",
        gain="the memory of a frozen layer's input, as the estimate assumes, and 44 -> 25 us of "
        "host time for forward and backward of a layer, compared with DeepSpeed's",
    ),
    "missing-gradients": Patch(
        targets=(
            f"{STAGE_3}.partition_grads(params_to_release, grad_partitions)",
            f"{STAGE_3}.independent_gradient_partition_epilogue()",
        ),
        stages=(3,), kind="correctness",
        reason="a parameter without a gradient counts as zeros; DeepSpeed uses the gradient "
        "of an earlier step again",
    ),
    "leaf-layers": Patch(
        targets=(f"{STAGE_3}.create_reduce_and_remove_grad_hooks()",),
        stages=(3,), kind="speed",
        reason="each layer is gathered as one; its gradients are still reduced one by one, so that "
        "a loss may run it twice",
        gain="31.6k -> 46.7k tokens/s on one GPU",
    ),
    "gathering": Patch(
        targets=(
            f"{ZERO}.partitioned_param_coordinator:iter_params(module, recurse)",
            f"{ZERO}.parameter_offload:iter_params(module, recurse)",
            f"{ZERO}.partition_parameters:Init._convert_to_deepspeed_param.all_gather("
            "param_list, async_op, hierarchy)",
        ),
        stages=(3,), kind="speed",
        reason="one event for all that is gathered together, one collective for what stays whole "
        "after a step, and modules searched for their parameters once",
        gain="336 -> 315 ms a step on two GPUs (1.5B); 270 -> 205 ms of a CPU rank's time",
    ),
    "several-dtypes": Patch(
        targets=(
            f"{ZERO}.stage3:defragment(tensors)", f"{STAGE_3}._set_fp16_partitioned_groups_flat()",
        ),
        stages=(3,), kind="correctness",
        reason="some weights stay in fp32; DeepSpeed lays all shards side by side in one dtype",
    ),
    "gather-after-update": Patch(
        targets=(f"{ZERO}.parameter_offload:DeepSpeedZeRoOffload.__allgather_stream",),
        stages=(3,), kind="correctness",
        reason="the stream that gathers waits for the update of the weights",
    ),
    "no-norm": Patch(
        targets=(
            f"{STAGE_3}._get_norm_groups()",
            f"{STAGE_3}.unscale_and_clip_grads(sub_group_id, total_norm)",
        ),
        stages=(3,), kind="speed", states="bf16",
        reason="the update over bf16 states clips and skips on the device; DeepSpeed waits for the "
        "norm",
        gain="365 -> 347 ms a step on one GPU (1.5B)",
    ),
}  # fmt: skip


def names_for(config: Config, resolved: Resolved) -> tuple[str, ...]:
    """Return the patches of a plan."""
    return tuple(
        name
        for name, patch in PATCHES.items()
        if resolved.stage in patch.stages
        and patch.states in ("any", config.optim.states)
        and (patch.offload or not resolved.offload_optimizer)
        and in_force(name, setting=config.backend_section.patches)
    )


def in_force(name: str, *, setting: str) -> bool:
    """Return whether a patch is for the installed DeepSpeed. With `setting` "correctness", and with
    a version newer than the tested ones, only those are that correct results need."""
    patch, version = PATCHES[name], installed_version()
    if older(version, patch.oldest):
        return False
    return patch.kind == "correctness" or (setting == "all" and not older(NEWEST, version))
