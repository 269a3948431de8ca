"""Gradients of ZeRO-3 reduced in fewer pieces, without a wait of the host, and zeros for what has
none. DeepSpeed's names are those of 0.19.0 to 0.19.8."""

from collections.abc import Iterable
from functools import partial
from typing import Any

import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.comm import coalesced_collectives
from deepspeed.runtime.zero import stage3
from torch import Tensor, distributed

deepspeed_reduce_scatter = coalesced_collectives.reduce_scatter_coalesced


class Ordered(torch.cuda.Stream):
    """A stream whose results are read on other streams: to wait for it is to order those."""

    def synchronize(self) -> None:
        """Have the current stream wait, and the host go on."""
        torch.cuda.current_stream().wait_stream(self)


@torch.no_grad()
def reduce_scatter(tensors: list[Tensor], group: Any = None) -> list[Tensor]:
    """The shard of each tensor's mean over the ranks that is this rank's, 1-D, all by one
    collective. DeepSpeed's own cuts every tensor for every rank."""
    world, rank = distributed.get_world_size(group), distributed.get_rank(group)
    if len(tensors) == 1 or any(item.numel() % world for item in tensors):
        return deepspeed_reduce_scatter(tensors, group)
    rows = torch.cat([item.view(world, -1) for item in tensors], dim=1)
    rows.div_(world)
    coalesced_collectives._torch_reduce_scatter_fn(rows.view(-1), rows[rank], group=group)
    return list(rows[rank].split([item.numel() // world for item in tensors]))


def lighten_reductions(optimizer: Any) -> None:
    """Let the host prepare the step while the last gradients are reduced, and keep all shards of a
    collective at once. DeepSpeed waits after each backward and copies shard by shard, which
    gradients on the host need and others do not."""
    if optimizer.offload_optimizer or getattr(optimizer, "all2all_process_group", None):
        return
    optimizer.partition_grads = partial(_keep_shards, optimizer)
    stream = optimizer.reduce_and_partition_stream
    if isinstance(stream, torch.cuda.Stream) and stream != torch.cuda.default_stream():
        optimizer.reduce_and_partition_stream = Ordered()


def _keep_shards(optimizer: Any, parameters: Iterable[Any], shards: Iterable[Tensor]) -> None:
    """Add the shards of these parameters' gradients to those of earlier micro-batches, and let the
    whole gradients go."""
    held = optimizer._DeepSpeedZeroOptimizer_Stage3__param_id_to_grad_partition
    stream = get_accelerator().current_stream()
    synchronized = get_accelerator().is_synchronized_device()
    sums, parts = [], []
    for parameter, shard in zip(parameters, shards, strict=True):
        if shard.numel():
            sums.append(held[parameter.ds_id][: shard.numel()])
            parts.append(shard)
        if parameter.grad is not None and not synchronized:
            parameter.grad.record_stream(stream)
        parameter.grad = None
    if not sums:
        return
    if optimizer.micro_step_id == 0:
        torch._foreach_copy_(sums, parts)
    else:
        torch._foreach_add_(sums, parts)


def count_as_zeros(optimizer: Any) -> None:
    """Let what a backward pass has no gradient for on any rank count as zeros. DeepSpeed keeps what
    an earlier one left: where a step's first micro-batch has none, that of the step before, and
    with the optimizer on the CPU, where its last has none, too."""
    keep, end = optimizer.partition_grads, optimizer.independent_gradient_partition_epilogue
    came: set[Any] = set()
    known: dict[Any, None] = {}

    def keep_what_came(parameters: list[Any], shards: list[Tensor]) -> Any:
        came.update(parameters)
        known.update(dict.fromkeys(parameters))
        return keep(parameters, shards)

    def finish() -> None:
        end()
        absent = [parameter for parameter in known if parameter not in came]
        came.clear()
        # On the accelerator, what earlier micro-batches of the step gave is all there is to keep.
        if not absent or (optimizer.micro_step_id > 0 and not optimizer.offload_optimizer):
            return
        accelerator, stream = get_accelerator(), optimizer.reduce_and_partition_stream
        in_line = accelerator.resolves_data_dependency()
        device = accelerator.current_device_name()
        if not in_line:
            # The last step's update may still read what is written.
            stream.wait_stream(accelerator.current_stream())
        with accelerator.stream(stream):
            for item in absent:
                keep([item], [torch.zeros(item.partition_numel(), dtype=item.dtype, device=device)])
        if not in_line:
            stream.synchronize()

    optimizer.partition_grads = keep_what_came
    optimizer.independent_gradient_partition_epilogue = finish


stage3.reduce_scatter_coalesced = reduce_scatter
