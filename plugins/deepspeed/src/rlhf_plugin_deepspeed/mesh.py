"""The process group, the seeds and the device: what happens before any model loads."""

import os
import random
from datetime import timedelta

import deepspeed
import numpy as np
import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.zero.partition_parameters import InsertPostInitMethodToModuleSubClasses
from deepspeed.utils import groups
from torch import distributed, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from rlhf.config.sections import Config
from rlhf.engine import Mesh
from rlhf.errors import RLHFError, first_line

RENDEZVOUS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
AXES = ("data", "sequence", "tensor")
ALLOCATOR = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")
"""Where users tell torch how to manage the accelerator's memory; the first is today's name."""


def join(config: Config, *, timeout: timedelta) -> Mesh:
    """Join the launcher's process group, or one that is there already, or start one of one
    process."""
    accelerator = get_accelerator()
    expand_segments(accelerator.device_name())
    _check_precision(config.model.dtype)
    backend = accelerator.communication_backend_name()
    given = [name for name in RENDEZVOUS if name in os.environ]
    if not distributed.is_initialized() and len(given) not in (0, len(RENDEZVOUS)):
        missing = ", ".join(name for name in RENDEZVOUS if name not in os.environ)
        raise RLHFError(
            f"the launcher set {', '.join(given)} but not {missing}: start the ranks with "
            "torchrun, or unset them to run one process."
        )
    numbers = [name for name in given if name != "MASTER_ADDR"]
    for name in numbers:
        if not os.environ[name].isdecimal():
            raise RLHFError(f"the launcher set {name} to {os.environ[name]!r}: give a number.")
    local_rank = _local_rank()
    os.environ.setdefault("LOCAL_RANK", str(local_rank))
    accelerator.set_device(local_rank)
    if not distributed.is_initialized() and not given:
        # A store in memory needs no port, so runs on one machine never collide.
        distributed.init_process_group(
            backend, store=distributed.HashStore(), rank=0, world_size=1, timeout=timeout
        )
    # For the CPU DeepSpeed would compile shared-memory collectives (50 s) that only its inference
    # uses.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    try:
        deepspeed.init_distributed(
            backend, auto_mpi_discovery=False, timeout=timeout, verbose=False
        )
    except (ValueError, distributed.DistNetworkError, distributed.DistStoreError) as error:
        if not given:
            raise
        place = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
        raise RLHFError(
            f"the ranks cannot meet at {place} ({first_line(error)}): check MASTER_ADDR "
            "and MASTER_PORT."
        ) from error
    # DeepSpeed communicates over a copy of the world's group, which it would make with torch's own
    # timeout.
    distributed.distributed_c10d._set_pg_timeout(timeout, groups._clone_world_group())
    return _mesh(local_rank)


def expand_segments(device: str) -> None:
    """Have torch's allocator let its blocks on `device` grow, where nobody said otherwise.

    No two batches have the same length, and blocks of fixed sizes that held the one do not fit the
    other: they fill the device until all that are free are given back at once and asked for again.
    """
    if device == "cuda" and not any(name in os.environ for name in ALLOCATOR):
        # torch reads the environment once, which in a run is before this.
        torch._C._accelerator_setAllocatorSettings("expandable_segments:True")


def seed(value: int, *, deterministic: bool) -> None:
    """Seed every generator alike on all ranks and choose deterministic kernels or fast ones."""
    random.seed(value)
    np.random.seed(value % 2**32)
    torch.manual_seed(value)
    get_accelerator().manual_seed_all(value)
    if deterministic:
        # cuBLAS reads it when it starts; without it torch refuses deterministic products.
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(deterministic)
    torch.backends.cudnn.benchmark = False


def restore() -> None:
    """Take back what DeepSpeed changes in the process: under ZeRO-3 it replaces torch's
    `linear`."""
    replaced = InsertPostInitMethodToModuleSubClasses
    if hasattr(replaced, "linear_bk"):
        nn.functional.linear = replaced.linear_bk


def leave() -> None:
    """End the process group and drop DeepSpeed's references to it, so that a later run can start
    one."""
    deepspeed.comm.destroy_process_group()
    deepspeed.comm.comm.cdb = None
    groups._WORLD_GROUP = None
    if "RANK" not in os.environ:
        # Without a launcher `join` set it, and half a rendezvous is refused.
        os.environ.pop("LOCAL_RANK", None)


def dissolve(axes: DeviceMesh) -> None:
    """End the groups that `join` made within one that stays: each of gloo's has threads that wake a
    hundred times a second."""
    for group in axes.get_all_groups():
        if group is not distributed.group.WORLD:
            distributed.destroy_process_group(group)


def _check_precision(precision: str) -> None:
    accelerator = get_accelerator()
    supported = {
        "bf16": accelerator.is_bf16_supported,
        "fp16": accelerator.is_fp16_supported,
        "fp32": lambda: True,
    }
    if not supported[precision]():
        raise RLHFError(
            f"model.dtype is {precision} but the accelerator here ({accelerator.device_name()}) "
            "does not train in it: set model.dtype to "
            f"{'bf16 or fp32' if precision == 'fp16' else 'fp16 or fp32'}."
        )


def _local_rank() -> int:
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    devices = get_accelerator().device_count()
    if get_accelerator().device_name() != "cpu" and local_rank >= devices:
        raise RLHFError(
            f"LOCAL_RANK is {local_rank} but this machine shows {devices} devices: start at most "
            f"{devices} ranks per machine."
        )
    return local_rank


def _mesh(local_rank: int) -> Mesh:
    accelerator = get_accelerator()
    world = distributed.get_world_size()
    name = accelerator.device_name()
    device = torch.device("cpu") if name == "cpu" else torch.device(name, local_rank)
    axes = init_device_mesh(name, (world, 1, 1), mesh_dim_names=AXES) if world > 1 else None
    total = int(accelerator.total_memory(local_rank))
    return Mesh(
        rank=distributed.get_rank(), world=world, local_rank=local_rank, device=device, axes=axes,
        memory=total if name != "cpu" else total // world,
    )  # fmt: skip
