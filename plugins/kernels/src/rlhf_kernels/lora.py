"""Linear layers under LoRA, whose update is added into the base's product and not beside it.

peft computes the update, its multiple and the sum one after the other, each of the output's size.
"""

import sys
from typing import Any

import torch
from torch import Tensor, nn

from rlhf.engine import fused_on, is_sharded, replace_forward
from rlhf.plugin import ModelConfig


def fuse_adapters(model: nn.Module, settings: ModelConfig, device: torch.device) -> None:
    """Have adapters in `model` that are two factors beside a frozen linear module run our forward,
    if `device` and `settings` allow fused kernels."""
    if settings.kernels == "none" or settings.quantize or not fused_on(device.type):
        return
    for module in model.modules():
        if is_plain(module):
            replace_forward(module, forward.__get__(module))


def is_plain(layer: Any) -> bool:
    """Return whether a module is an adapter that `forward` can compute. At ZeRO-3, which may gather
    module by module, there is none."""
    lora = sys.modules.get("peft.tuners.lora")  # Not imported where no model has an adapter.
    if lora is None or type(layer) is not lora.Linear or type(layer.base_layer) is not nn.Linear:
        return False
    names, parameters = list(layer.lora_A), list(layer.parameters())
    return (
        len(names) == 1
        and names == layer.active_adapters
        and not layer.lora_variant
        and isinstance(layer.lora_dropout[names[0]], nn.Identity)
        and layer.lora_B[names[0]].bias is None
        and not any(parameter.requires_grad for parameter in layer.base_layer.parameters())
        and not any(is_sharded(parameter) for parameter in parameters)
        and len({parameter.dtype for parameter in parameters}) == 1
    )


def forward(layer: Any, hidden: Tensor, *rest: Any, **options: Any) -> Tensor:
    """Compute what an adapter's own forward computes from `hidden` [..., in]."""
    if rest or options or layer.disable_adapters or layer.merged:
        return type(layer).forward(layer, hidden, *rest, **options)
    (name,) = layer.active_adapters
    base, down, up = layer.base_layer, layer.lora_A[name], layer.lora_B[name]
    if torch.compiler.is_compiling():
        # The compiler fuses the sum. Of [T, rank] and [T, out], the first is cheaper to scale.
        return base(hidden) + up(layer.scaling[name] * down(hidden))
    rows = hidden.flatten(0, -2)
    output = Updated.apply(rows, down.weight, up.weight, base, layer.scaling[name])
    return output.unflatten(0, hidden.shape[:-1])


class Updated(torch.autograd.Function):
    """`base`, a frozen linear module, of `rows` [T, in], plus `scaling` times their product with
    the transposes of `down` [rank, in] and `up` [out, rank]: [T, out]."""

    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, down: Tensor, up: Tensor, base: Any, scaling: float
    ) -> Tensor:
        low = scaling * (rows @ down.t())
        ctx.save_for_backward(rows, low, base.weight, down, up)
        ctx.scaling = scaling
        # A new tensor, so it may be changed in place.
        return base(rows).addmm_(low, up.t())

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        rows, low, weight, down, up = ctx.saved_tensors
        to_low = ctx.scaling * (gradient @ up)
        to_rows = (gradient @ weight).addmm_(to_low, down) if ctx.needs_input_grad[0] else None
        return to_rows, to_low.t() @ rows, gradient.t() @ low, None, None
