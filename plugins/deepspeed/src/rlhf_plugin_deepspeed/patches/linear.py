"""torch's linear for weights that ZeRO-3 shards, without keeping their memory."""

from collections.abc import Collection
from typing import Any

import torch
from deepspeed.runtime.zero.linear import zero3_linear_wrap as deepspeed_linear
from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus
from torch import Tensor
from torch.nn import functional

from rlhf_plugin_deepspeed.patches.install import replace

plain_linear = torch._C._nn.linear
"""torch.nn.functional.linear."""


def replace_linear(patches: Collection[str]) -> None:
    """Replace torch's linear until the run ends, without the patch by DeepSpeed's, which DeepSpeed
    itself would leave behind; some versions install it only once per process."""
    replace("linear", functional, linear=linear if "linear" in patches else deepspeed_linear)


class ShardedLinear(torch.autograd.Function):
    """`input` [..., in] times the transpose of `weight` [out, in], plus `bias` [out].

    torch's own keeps a view of the weight for backward, and with it the memory that ZeRO-3 takes
    back after the layer; this keeps the parameter, whatever it holds by then.
    """

    @staticmethod
    def forward(ctx: Any, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        to_input, to_weight, _ = ctx.needs_input_grad
        ctx.save_for_backward(input if to_weight else None, weight if to_input else None)
        if bias is None or input.dim() == 2:
            return plain_linear(input, weight, bias)
        rows = plain_linear(input.reshape(-1, input.shape[-1]), weight, bias)
        # The result of a view could not be changed in place.
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
    # DeepSpeed does not gather a module for backward whose output needs no gradient. Recomputation
    # passes a plain tensor here, which is gathered.
    absent = getattr(weight, "ds_status", None) is ZeroParamStatus.NOT_AVAILABLE
    if absent:
        weight.all_gather()
    try:
        return gradient @ weight
    finally:
        if absent:
            weight.partition()


def linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Apply a linear layer as torch.nn.functional.linear does."""
    if not (hasattr(weight, "ds_id") and torch.is_grad_enabled()):
        return plain_linear(input, weight, bias)
    if torch.is_autocast_enabled(input.device.type):
        return deepspeed_linear(input, weight, bias)
    return ShardedLinear.apply(input, weight, bias)
