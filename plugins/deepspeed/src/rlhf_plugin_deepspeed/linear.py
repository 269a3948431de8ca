"""torch's linear for weights that ZeRO-3 shards, and no memory of theirs kept by it."""

from typing import Any

import torch
from deepspeed.runtime.zero import partition_parameters
from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus
from torch import Tensor

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
