"""The process group, the seeds and the device, before any model loads."""

import os
import random
from collections.abc import Mapping
from datetime import timedelta
from importlib import import_module
from types import SimpleNamespace

import deepspeed
import numpy as np
import torch
from attrs import evolve
from deepspeed.accelerator import get_accelerator
from deepspeed.utils import groups, nvtx
from torch import distributed

from rlhf.engine import Axis, Mesh, axes
from rlhf.errors import RLHFError, SameOnAllRanks
from rlhf.plugin import Config
from rlhf_plugin_deepspeed.capabilities import PRECISIONS
from rlhf_plugin_deepspeed.config import resolve
from rlhf_plugin_deepspeed.patches.install import path_of, replace, run_scope
from rlhf_plugin_deepspeed.patches.stage_3 import forget_modules
from rlhf_plugin_deepspeed.patches.table import PATCHES, in_force
from rlhf_plugin_deepspeed.rendezvous import RENDEZVOUS, launcher_variables, meet

ALLOCATOR = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")
"""Where users configure torch's allocator; the first is today's name."""
ACROSS = {
    "data": ("sequence", "tensor"),
    "shards": ("tensor",),
    "sequence": ("data", "tensor"),
    "tensor": ("data", "sequence"),
}
"""For each axis, those along which the ranks of one of its groups have the same position."""


def join(config: Config, *, timeout: timedelta) -> Mesh:
    """Join the launcher's process group or one that is running, else start one of one process."""
    accelerator = get_accelerator()
    expand_segments(accelerator.device_name())
    _check_precision(config)
    launcher = launcher_variables()
    local_rank = _local_rank()
    if "LOCAL_RANK" not in os.environ:
        # DeepSpeed reads it. After the run it would be half a rendezvous, which is refused.
        os.environ["LOCAL_RANK"] = str(local_rank)
        run_scope.callback(os.environ.pop, "LOCAL_RANK", None)
    accelerator.set_device(local_rank)
    backend = accelerator.communication_backend_name()
    if not distributed.is_initialized():
        rank, world = (int(os.environ[name]) for name in RENDEZVOUS[:2]) if launcher else (0, 1)
        # A store in memory needs no port, so runs on one machine never collide.
        store = meet(timeout) if launcher else distributed.HashStore()
        distributed.init_process_group(
            backend, store=store, rank=rank, world_size=world, timeout=timeout
        )
    # `comm.torch` is torch itself.
    replace("no-shm-build", import_module("deepspeed.comm.torch"), build_shm_op=lambda: None)
    setting = config.backend_section.patches
    if in_force("no-ranges", setting=setting):
        replace("no-ranges", nvtx, enable_nvtx=False)
    if in_force("no-passes", setting=setting):
        engine = import_module("deepspeed.runtime.engine")
        replace("no-passes", engine, is_deepcompile_supported=lambda: False)
    for target in PATCHES["fresh-groups"].targets:
        path, name = path_of(target)
        replace("fresh-groups", import_module(path), **{name: None})
    forget_modules()
    deepspeed.init_distributed(backend, auto_mpi_discovery=False, timeout=timeout, verbose=False)
    sizes = axis_sizes(config, distributed.get_world_size())
    # DeepSpeed's own copy of the world's group and its group for hpZ would have torch's timeout.
    groups._WORLD_GROUP = distributed.new_group(timeout=timeout)
    second = config.backend_section.hpz_partition_size
    if second > 1:
        groups._ZERO_PARAM_INTRA_PARALLEL_GROUP, _ = distributed.new_subgroups(
            second, timeout=timeout
        )
    mesh = _mesh(local_rank, with_groups(distributed.get_rank(), sizes, timeout=timeout))
    if backend == "gloo":
        # A rank that ends at once would close connections that another one is still making.
        distributed.barrier(groups._WORLD_GROUP)
    return mesh


def axis_sizes(config: Config, ranks: int) -> dict[str, int]:
    """Return the sizes of the axes. Raises RLHFError if a setting does not divide the ranks."""
    section = config.backend_section
    for setting in ("sequence_parallel", "tensor_parallel", "hpz_partition_size"):
        size = getattr(section, setting)
        if ranks % size:
            allowed = [str(each) for each in range(1, ranks + 1) if ranks % each == 0]
            raise SameOnAllRanks(
                f"deepspeed.{setting} is {size}, which does not divide the number of ranks, "
                f"{ranks}; set it to {' or '.join(allowed)}"
            )
    sequence, tensor = section.sequence_parallel, section.tensor_parallel
    return {"data": ranks // (sequence * tensor), "sequence": sequence, "tensor": tensor}


def with_groups(rank: int, sizes: Mapping[str, int], *, timeout: timedelta) -> dict[str, Axis]:
    """Return the axes as `rank` sees them, with their process groups. Collective. An axis of one
    rank or of all ranks needs none of its own, except `shards`, whose group DeepSpeed is told."""
    world = distributed.get_world_size()
    places = [axes(other, **sizes) for other in range(world)]
    own = places[rank]
    for name, across in ACROSS.items():
        if own[name].size == world or (own[name].size == 1 and name != "shards"):
            continue
        lines: dict[tuple[int, ...], list[int]] = {}
        for other, place in enumerate(places):
            lines.setdefault(tuple(place[each].rank for each in across), []).append(other)
        group, _ = distributed.new_subgroups_by_enumeration([*lines.values()], timeout=timeout)
        own[name] = evolve(own[name], group=group)
    return own


def groups_of(mesh: Mesh) -> SimpleNamespace:
    """Return the groups of the axes as DeepSpeed asks for them, by Megatron-LM's names."""
    data, model = mesh.shards, mesh.tensor
    return SimpleNamespace(
        get_data_parallel_group=lambda: data.group,
        get_data_parallel_world_size=lambda: data.size,
        get_model_parallel_group=lambda: model.group or distributed.group.WORLD,
        get_model_parallel_world_size=lambda: model.size,
        get_model_parallel_rank=lambda: model.rank,
    )


def close_groups(mesh: Mesh) -> None:
    """End the groups of the axes, of second copies and of DeepSpeed's world."""
    axes_of_mesh = (getattr(mesh, name).group for name in ACROSS)
    for group in (*axes_of_mesh, groups._ZERO_PARAM_INTRA_PARALLEL_GROUP, groups._WORLD_GROUP):
        if group is not None:
            distributed.destroy_process_group(group)


def expand_segments(device: str) -> None:
    """Let torch's allocator grow its blocks on `device`, unless the user configured it: blocks of
    fixed sizes for one batch do not fit the next, which has another length."""
    if device == "cuda" and not any(name in os.environ for name in ALLOCATOR):
        # torch has read the environment before this.
        torch._C._accelerator_setAllocatorSettings("expandable_segments:True")


def seed(value: int, *, deterministic: bool) -> None:
    """Seed every generator alike on all ranks, and choose deterministic kernels or fast ones."""
    random.seed(value)
    np.random.seed(value % 2**32)
    torch.manual_seed(value)
    if deterministic:
        # cuBLAS reads it at start-up; without it torch refuses deterministic products.
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(deterministic)
    torch.backends.cudnn.benchmark = False


def precisions() -> list[str]:
    """Return the values of `model.dtype` that the accelerator here supports."""
    accelerator = get_accelerator()
    supports = {"bf16": accelerator.is_bf16_supported, "fp16": accelerator.is_fp16_supported}
    return [name for name in PRECISIONS if name not in supports or supports[name]()]


def _check_precision(config: Config) -> None:
    precision, here = config.model.dtype, precisions()
    if precision in here:
        return
    setting, remedy = "model.dtype", f"set model.dtype to {' or '.join(reversed(here))}"
    section = config.backend_section
    if (preset := resolve(section)).dtype is not None:
        setting = f"the precision of the preset {section.preset}"
        remedy = f"use the preset zero{preset.stage}, and {remedy}"
    raise RLHFError(
        f"{setting} is {precision}, which the accelerator here "
        f"({get_accelerator().device_name()}) does not support; {remedy}"
    )


def _local_rank() -> int:
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    devices = get_accelerator().device_count()
    if get_accelerator().device_name() != "cpu" and local_rank >= devices:
        raise RLHFError(
            f"LOCAL_RANK is {local_rank} but this machine has {devices} devices; start at most "
            f"{devices} ranks per machine"
        )
    return local_rank


def _mesh(local_rank: int, places: Mapping[str, Axis]) -> Mesh:
    accelerator = get_accelerator()
    world = distributed.get_world_size()
    device = torch.device(accelerator.device_name(local_rank))
    total = int(accelerator.total_memory(local_rank))
    return Mesh(
        rank=distributed.get_rank(),
        world=world,
        local_rank=local_rank,
        device=device,
        memory=total // world if device.type == "cpu" else total,
        **places,
    )
