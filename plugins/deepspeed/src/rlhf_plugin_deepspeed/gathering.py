"""ZeRO-3 with less for the host to do.

Each step gathers every layer twice, and DeepSpeed looks after every parameter of it by itself: a
copy for each rank, an event to wait for, a range for a profiler. On several accelerators that made
the host the slower side (benchmarks/NOTES.md). Here a gathering is one piece of work, and after a
backward and after an update the streams wait for each other where DeepSpeed has the host wait for
them. DeepSpeed's names are those of 0.19.0 to 0.19.8.
"""

import inspect
import itertools
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.comm import coalesced_collectives
from deepspeed.runtime.zero import (
    parameter_offload,
    partition_parameters,
    partitioned_param_coordinator,
    stage3,
)
from deepspeed.runtime.zero.partition_parameters import AllGatherCoalescedHandle, ZeroParamStatus
from deepspeed.runtime.zero.partitioned_param_coordinator import InflightParamRegistry
from deepspeed.utils import nvtx
from torch import Tensor, distributed, nn

plain_linear = torch._C._nn.linear
"""torch.nn.functional.linear, which DeepSpeed replaces for the whole process."""
deepspeed_linear = partition_parameters.zero3_linear_wrap
deepspeed_reduce_scatter = coalesced_collectives.reduce_scatter_coalesced
deepspeed_print = partition_parameters.print_rank_0
deepspeed_parameters = partitioned_param_coordinator.iter_params


class ShardedLinear(torch.autograd.Function):
    """`input` [..., in] times the transpose of `weight` [out, in], plus `bias` [out].

    torch's own keeps a view of the weight for backward, and with it the memory that ZeRO-3 wants
    back after the layer; this keeps the parameter, whatever it holds then.
    """

    @staticmethod
    def forward(ctx: Any, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        to_input, to_weight, _ = ctx.needs_input_grad
        ctx.save_for_backward(input if to_weight else None, weight if to_input else None)
        if bias is None or input.dim() == 2:
            return plain_linear(input, weight, bias)
        rows = plain_linear(input.reshape(-1, input.shape[-1]), weight, bias)
        # A view could not be changed in place.
        return torch.ops.aten._unsafe_view(rows, [*input.shape[:-1], len(weight)])

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (gradient,) = gradients
        input, weight = ctx.saved_tensors
        to_input, to_weight, to_bias = ctx.needs_input_grad
        rows = gradient.reshape(-1, gradient.shape[-1])
        return (
            _times_weight(gradient, weight) if to_input else None,
            rows.t() @ input.reshape(-1, input.shape[-1]) if to_weight else None,
            rows.sum(0) if to_bias else None,
        )


def _times_weight(gradient: Tensor, weight: Any) -> Tensor:
    # A module whose output needs no gradient by itself is not gathered for backward. What runs a
    # layer again hands over a tensor that is no parameter, just gathered.
    absent = getattr(weight, "ds_status", None) is ZeroParamStatus.NOT_AVAILABLE
    if absent:
        weight.all_gather()
    try:
        return gradient @ weight
    finally:
        if absent:
            weight.partition()


def linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """What stands for torch.nn.functional.linear once a model's weights are sharded."""
    if not (hasattr(weight, "ds_id") and torch.is_grad_enabled()):
        return plain_linear(input, weight, bias)
    if torch.is_autocast_enabled(input.device.type):
        return deepspeed_linear(input, weight, bias)
    return ShardedLinear.apply(input, weight, bias)


class GatherHandle(AllGatherCoalescedHandle):
    """Parameters on their way from all ranks in one buffer, [ranks, elements of all shards]."""

    complete: bool

    def wait(self, handle_dependency: bool = True) -> None:
        """Have the current stream wait for them and copy each to a place of its own."""
        # A view of the buffer for each rank; where weights are quantized they come later.
        buffer = self.partitions[0]._base if self.partitions else None
        if self.complete or not handle_dependency or buffer is None or not self._is_even(buffer):
            super().wait(handle_dependency=handle_dependency)
            return
        assert all(item.ds_status is ZeroParamStatus.INFLIGHT for item in self.params)
        self.allgather_handle.wait()
        sizes = [parameter.ds_tensor.ds_numel for parameter in self.params]
        wholes = [buffer.new_empty((self.world_size, size)) for size in sizes]
        with torch.no_grad():
            rows = buffer.view(self.world_size, -1)
            torch.split_with_sizes_copy(rows, sizes, dim=1, out=wholes)
        for parameter, whole in zip(self.params, wholes, strict=True):
            if parameter.ds_numel < whole.numel():
                # Shards of one size are padded at the end.
                whole = whole.view(-1)[: parameter.ds_numel]
            parameter.data = whole.view(parameter.ds_shape)
            parameter.ds_status = ZeroParamStatus.AVAILABLE
        if not get_accelerator().is_synchronized_device():
            # It may have been made on another stream than the one that reads it here.
            buffer.record_stream(get_accelerator().current_stream())
        self.complete = True

    def _is_even(self, buffer: Tensor) -> bool:
        """Whether every shard is in the buffer as the parameter wants it."""
        return (
            self.quantization is None
            and not self.use_secondary_tensor
            and all(parameter.ds_tensor.dtype == buffer.dtype for parameter in self.params)
        )


class Inflight(InflightParamRegistry):
    """Which parameters are on their way. All that come together leave with the first that is waited
    for: one event for a layer instead of one for each of its parameters.

    One that a pass fetched ahead and did not use is released by the optimizer's step, or used by
    the next pass.
    """

    def pop(self, parameter: nn.Parameter, *default: Any) -> Any:
        """What to wait for."""
        handle = super().pop(parameter, *default)
        for other in _parameters(handle):
            self.data.pop(other, None)
        return handle


def _parameters(handle: Any) -> Iterable[nn.Parameter]:
    for part in getattr(handle, "handles", (handle,)):
        yield from getattr(part, "params", ())


def gather_at_once(optimizer: Any) -> None:
    """Have the parameters that stay whole gathered in one collective after a step. DeepSpeed takes
    one for each and then waits for the device."""
    if not optimizer.persistent_parameters:
        return
    first: Any = optimizer.persistent_parameters[0]
    own = first.all_gather

    def all_gather(param_list: Any = None, async_op: bool = False, hierarchy: int = 0) -> Any:
        if param_list is not optimizer.persistent_parameters or async_op:
            return own(param_list, async_op=async_op, hierarchy=hierarchy)
        absent = [item for item in param_list if item.ds_status is ZeroParamStatus.NOT_AVAILABLE]
        if absent:
            first.all_gather_coalesced(absent).wait()
        return None

    first.all_gather = all_gather


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


def fence_of(offload: Any) -> Callable[[], None]:
    """What keeps gatherings, which run on a stream of their own, behind an update of the weights
    that was launched. `offload` is DeepSpeed's for one engine."""
    accelerator = get_accelerator()
    if accelerator.is_synchronized_device():
        return lambda: None
    stream = getattr(offload, "_DeepSpeedZeRoOffload__allgather_stream", None)
    if stream is None:
        # A later DeepSpeed may call it something else.
        return lambda: accelerator.current_stream().synchronize()
    return lambda: stream.wait_stream(accelerator.current_stream())


_known: WeakKeyDictionary[nn.Module, dict[bool, tuple[Any, ...]]] = WeakKeyDictionary()


def remember_parameters(model: nn.Module) -> None:
    """Have DeepSpeed not search each module of `model` for its parameters, nor read the signatures
    of its hooks, in every pass."""
    for module in model.modules():
        _known[module] = {}
        for name in ("pre_bwd_fn", "post_bwd_fn"):
            forward = getattr(vars(module).get(name), "forward", None)
            if forward is not None:
                forward.__signature__ = inspect.signature(forward)


def parameters_of(module: Any, recurse: bool = False) -> Iterable[Any]:
    """The parameters of a module and those that it takes from elsewhere."""
    known = _known.get(module)
    if known is None:
        return deepspeed_parameters(module, recurse)
    if recurse not in known:
        known[recurse] = tuple(module.parameters(recurse))
    external = (parameter for _, parameter in module.ds_external_parameters())
    return itertools.chain(known[recurse], external)


def print_forced(message: str, debug: bool = False, force: bool = False) -> None:
    """DeepSpeed's own asks for the rank before it prints nothing, in every pass."""
    if debug or force:
        deepspeed_print(message, debug=debug, force=force)


partition_parameters.zero3_linear_wrap = linear
partition_parameters.AllGatherCoalescedHandle = GatherHandle
partition_parameters.print_rank_0 = print_forced
partitioned_param_coordinator.print_rank_0 = print_forced
partitioned_param_coordinator.iter_params = parameters_of
parameter_offload.iter_params = parameters_of
stage3.reduce_scatter_coalesced = reduce_scatter
# Around every call of DeepSpeed's, for NVIDIA's profiler alone.
nvtx.enable_nvtx = False
