"""ZeRO-3 with less for the host to do.

Each step gathers every layer twice, and DeepSpeed looks after every parameter of it by itself: a
copy for each rank, an event to wait for, a range for a profiler. On several accelerators that made
the host the slower side (benchmarks/NOTES.md). Here a gathering is one piece of work. DeepSpeed's
names are those of 0.19.0 to 0.19.8.
"""

from collections.abc import Iterable
from typing import Any

import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.zero import partition_parameters
from deepspeed.runtime.zero.partition_parameters import AllGatherCoalescedHandle, ZeroParamStatus
from deepspeed.runtime.zero.partitioned_param_coordinator import InflightParamRegistry
from deepspeed.utils import nvtx
from torch import Tensor, nn

plain_linear = torch._C._nn.linear
"""torch.nn.functional.linear, which DeepSpeed replaces for the whole process."""
deepspeed_linear = partition_parameters.zero3_linear_wrap


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
            # Shards of one size may be padded at the end.
            flat = whole.view(-1)
            if parameter.ds_numel < flat.numel():
                flat = flat[: parameter.ds_numel]
            parameter.data = flat.view(parameter.ds_shape)
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


partition_parameters.zero3_linear_wrap = linear
partition_parameters.AllGatherCoalescedHandle = GatherHandle
# Around every call of DeepSpeed's, for NVIDIA's profiler alone.
nvtx.enable_nvtx = False
