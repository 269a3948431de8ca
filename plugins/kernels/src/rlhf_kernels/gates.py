"""Gated feed-forward layers, down(act(gate(x)) * up(x)), that compute the product again in backward
instead of keeping it.

It saves a quarter of a layer's activations for two passes over its gates (selective activation
recomputation, Korthikanti et al., arXiv 2205.05198).
"""

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.functional import gelu, silu

from rlhf.engine import replace_forward

Product = Callable[[Tensor, Tensor], Tensor]
"""act(gate) * up; keeps only both factors for backward."""
PARTS = (
    (("gate_proj", "up_proj"), "down_proj"),
    (("gate_up_proj",), "down_proj"),
    (("w1", "w3"), "w2"),  # LFM2
    (("input_linear",), "output_linear"),  # Granite
)
"""Names of the linear modules of a gated layer: those of its factors, or the one of both, and the
one that takes the product."""
ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": silu, "gelu": partial(gelu, approximate="tanh"),
}  # fmt: skip
"""Those that Liger's kernels compute."""


def gates_of(decoder: nn.Module) -> list[Any]:
    """Return the gated feed-forward layers of a decoder, recognised by their parts' names."""
    return [module for module in decoder.modules() if parts_of(module)[0]]


def parts_of(layer: nn.Module) -> tuple[tuple[str, ...], str]:
    """Return which of `PARTS` a layer has; no names if it is not a gated one."""
    for inputs, output in PARTS:
        parts = map(layer._modules.get, (*inputs, output))
        if all(hasattr(part, "in_features") for part in parts):
            return inputs, output
    return (), ""


def activation_of(layer: nn.Module) -> str:
    """Return the activation of a layer that computes down(act(gate(x)) * up(x)) and nothing more:
    `silu`, or `gelu` approximated by tanh. Empty for any other layer. A few numbers sent through
    the layer's code, with small linear modules in it, tell."""
    inputs, output = parts_of(layer)
    if not inputs or layer._parameters or layer._buffers:
        return ""
    same: Any = copy.copy(layer)
    draw = torch.Generator().manual_seed(0)

    def linear(inputs: int, outputs: int) -> nn.Module:
        module = nn.utils.skip_init(nn.Linear, inputs, outputs, bias=False, device="cpu")
        module.weight.data = torch.randn(outputs, inputs, generator=draw, device="cpu")
        return module

    drawn = {name: linear(4, 12 // len(inputs)) for name in inputs} | {output: linear(6, 4)}
    others = {name: copy.copy(part) for name, part in layer._modules.items()}
    same.__dict__["_modules"] = others | drawn
    for part in (same, *same.children()):
        part.training = True  # A layer with dropout does more.
    # Large values show a layer that limits them.
    sample = torch.tensor([[1.0], [30.0], [1000.0]], device="cpu")
    sample = sample * torch.randn(3, 4, generator=draw, device="cpu")
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        try:
            actual = type(layer).forward(same, sample)
        except Exception:  # A layer of another kind may need anything.
            return ""
        gate, up = factors(same, sample)
        for name, activation in ACTIVATIONS.items():
            expected = output_of(same, activation(gate) * up)
            if isinstance(actual, Tensor) and torch.allclose(actual, expected, rtol=1e-5):
                return name
    return ""


def recompute_products(decoder: nn.Module, products: dict[int, Product]) -> None:
    """Have all gated layers compute their product again in backward.

    `products` holds fused products by the ids of the layers; other layers use their own activation.
    """
    for layer in gates_of(decoder):
        activation = getattr(layer, "act_fn", None) or getattr(layer, "activation_fn", None)
        product = products.get(id(layer)) or partial(OwnProduct.apply, activation)
        replace_forward(layer, partial(_forward, layer, product=product))


def _forward(layer: Any, hidden: Tensor, *, product: Product) -> Tensor:
    gate, up = factors(layer, hidden)
    value = product(gate, up)
    if not torch.is_grad_enabled():
        return output_of(layer, value)
    with saved_tensors_hooks(*_recomputing(value, gate, up, product)):
        return output_of(layer, value)


def factors(layer: Any, hidden: Tensor) -> tuple[Tensor, Tensor]:
    """Return the factors of the product: the gate before its activation, and the other input."""
    found = [getattr(layer, name)(hidden) for name in parts_of(layer)[0]]
    if len(found) == 1:
        found = [half.contiguous() for half in found[0].chunk(2, dim=-1)]
    gate, up = found
    return gate, up


def output_of(layer: Any, product: Tensor) -> Tensor:
    """Return what a gated layer makes of the product of its factors."""
    output: Tensor = getattr(layer, parts_of(layer)[1])(product)
    return output


def _recomputing(
    value: Tensor, gate: Tensor, up: Tensor, product: Product
) -> tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]]:
    """Return hooks for saved tensors that keep a shape in place of the product `value`."""
    storage, size = _storage(value), value.numel()

    def pack(saved: Tensor) -> Any:
        # The last module may save a view of the product, so the storage is compared. Under LoRA
        # with dropout it also saves other tensors, which are kept as they are.
        same = _storage(saved) == storage and saved.numel() == size
        return saved.shape if same and saved.is_contiguous() else saved

    def unpack(packed: Any) -> Tensor:
        if isinstance(packed, Tensor):
            return packed
        with torch.no_grad():
            return product(gate, up).view(packed)

    return pack, unpack


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


class OwnProduct(torch.autograd.Function):
    """act(gate) * up by torch's operators. Backward applies the activation again."""

    @staticmethod
    def forward(
        ctx: Any, activation: Callable[[Tensor], Tensor], gate: Tensor, up: Tensor
    ) -> Tensor:
        ctx.save_for_backward(gate, up)
        ctx.activation = activation
        return activation(gate) * up

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        gate, up = (item.detach().requires_grad_() for item in ctx.saved_tensors)
        with torch.enable_grad():
            product = ctx.activation(gate) * up
        return None, *torch.autograd.grad(product, (gate, up), gradient)
