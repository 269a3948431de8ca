"""ZeRO-3: gradients reduced in fewer pieces, without a wait of the host, zeros for those that are
missing, and weights gathered after their update."""

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.comm import coalesced_collectives
from deepspeed.runtime.zero import stage3
from torch import Tensor, distributed

from rlhf_plugin_deepspeed.patches.install import check_target, replace

deepspeed_reduce_scatter = coalesced_collectives.reduce_scatter_coalesced


def reduce_at_once(optimizer: Any) -> None:
    """Reduce and keep the gradients of `optimizer`, DeepSpeed's at stage 3, in fewer pieces.

    Without offload, all shards of a collective are kept at once, and the host prepares the step
    while the last gradients are reduced. DeepSpeed waits after each backward pass.
    """
    replace("reduction", stage3, reduce_scatter_coalesced=reduce_scatter)
    if optimizer.offload_optimizer or getattr(optimizer, "all2all_process_group", None):
        return
    held = check_target("reduction", optimizer, "__param_id_to_grad_partition")
    keep = partial(keep_shards, optimizer, getattr(optimizer, held))
    replace("reduction", optimizer, partition_grads=keep)
    accelerator, stream = get_accelerator(), optimizer.reduce_and_partition_stream
    if not accelerator.is_synchronized_device() and stream != accelerator.default_stream():
        replace("reduction", optimizer, reduce_and_partition_stream=ordered(type(stream)))


@torch.no_grad()
def reduce_scatter(tensors: list[Tensor], group: Any = None) -> list[Tensor]:
    """Return this rank's shard of each tensor's mean over the ranks, 1-D, by one collective for
    all. DeepSpeed's own cuts every tensor for every rank."""
    world, rank = distributed.get_world_size(group), distributed.get_rank(group)
    if len(tensors) == 1 or any(item.numel() % world for item in tensors):
        return deepspeed_reduce_scatter(tensors, group)
    rows = torch.cat([item.view(world, -1) for item in tensors], dim=1)
    rows.div_(world)
    coalesced_collectives._torch_reduce_scatter_fn(rows.view(-1), rows[rank], group=group)
    return list(rows[rank].split([item.numel() // world for item in tensors]))


def ordered(kind: type) -> Any:
    """Return a stream of this class whose results are read on other streams: to wait for it is to
    let the current stream wait, while the host continues."""

    def synchronize(stream: Any) -> None:
        get_accelerator().current_stream().wait_stream(stream)

    return type("Ordered", (kind,), {"synchronize": synchronize})()


def keep_shards(
    optimizer: Any,
    held: dict[int, Tensor],
    params_to_release: Iterable[Any],
    grad_partitions: Iterable[Tensor],
) -> None:
    """Add the shards of these parameters' gradients to those `held` from earlier micro-batches, and
    release the whole gradients."""
    stream = get_accelerator().current_stream()
    synchronized = get_accelerator().is_synchronized_device()
    sums, parts = [], []
    for parameter, shard in zip(params_to_release, grad_partitions, strict=True):
        if shard.numel():
            # A shard may be padded at its end.
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


class MissingGradients:
    """Counts as zeros what a backward pass gives no gradient on any rank.

    DeepSpeed keeps the shard of an earlier pass then: where a step's first micro-batch has no
    gradient, that of the step before; with the optimizer on the CPU, also where its last has none.
    """

    def __init__(self, optimizer: Any) -> None:
        self._optimizer = optimizer
        self._reduced: set[Any] = set()
        """Parameters with a gradient in this pass."""
        self._known: dict[Any, None] = {}
        """Parameters that ever had one, in their order, the same on all ranks."""
        self._keep = optimizer.partition_grads
        self._end = optimizer.independent_gradient_partition_epilogue
        replace(
            "missing-gradients",
            optimizer,
            partition_grads=self._partition_grads,
            independent_gradient_partition_epilogue=self._finish,
        )

    def _partition_grads(self, params_to_release: list[Any], grad_partitions: list[Tensor]) -> Any:
        self._reduced.update(params_to_release)
        self._known.update(dict.fromkeys(params_to_release))
        return self._keep(params_to_release, grad_partitions)

    def _finish(self) -> None:
        self._end()
        missing = [parameter for parameter in self._known if parameter not in self._reduced]
        self._reduced.clear()
        optimizer = self._optimizer
        # Without offload, the sum of the step's earlier micro-batches is right as it is.
        if missing and (optimizer.micro_step_id == 0 or optimizer.offload_optimizer):
            self._write_zeros(missing)

    def _write_zeros(self, missing: list[Any]) -> None:
        accelerator, stream = get_accelerator(), self._optimizer.reduce_and_partition_stream
        in_line = accelerator.resolves_data_dependency()
        device = accelerator.current_device_name()
        if not in_line:
            # The update of the last step may still read what is written here.
            stream.wait_stream(accelerator.current_stream())
        with accelerator.stream(stream):
            for item in missing:
                zeros = torch.zeros(item.partition_numel(), dtype=item.dtype, device=device)
                self._keep([item], [zeros])
        if not in_line:
            stream.synchronize()


def fence_of(offload: Any) -> Callable[[], None]:
    """Return a function that keeps gatherings, which run on a stream of their own, behind an update
    that was launched. `offload` is DeepSpeed's for one engine."""
    stream = getattr(offload, check_target("gather-after-update", offload, "__allgather_stream"))
    accelerator = get_accelerator()
    if accelerator.is_synchronized_device():
        return lambda: None
    return lambda: stream.wait_stream(accelerator.current_stream())
