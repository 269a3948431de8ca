"""Gated feed-forward layers, down(act(gate(x)) * up(x)), that compute the product again in backward
instead of keeping it: a quarter of what a layer keeps, for two passes over its gates (selective
activation recomputation, Korthikanti et al., arXiv 2205.05198)."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

Product = Callable[[Tensor, Tensor], Tensor]
"""act(gate) * up, with nothing kept for backward but both factors."""
PARTS = ({"gate_proj", "up_proj", "down_proj"}, {"gate_up_proj", "down_proj"})


def gates_of(decoder: nn.Module) -> list[Any]:
    """The gated feed-forward layers of a decoder, by the names of their parts."""
    return [
        module
        for module in decoder.modules()
        if any(names <= dict(module.named_children()).keys() for names in PARTS)
    ]


def forget_products(decoder: nn.Module, products: dict[int, Product]) -> None:
    """Have all gated layers compute their product again in backward. `products` are the fused ones
    by the layers' ids; others take their own activation."""
    for layer in gates_of(decoder):
        known = products.get(id(layer))
        product = known or partial(OwnProduct.apply, _activation(layer))
        layer.__dict__["forward"] = partial(_forward, layer, product=product)


def _activation(layer: Any) -> Callable[[Tensor], Tensor]:
    return getattr(layer, "act_fn", None) or layer.activation_fn


def _forward(layer: Any, hidden: Tensor, *, product: Product) -> Tensor:
    gate, up = factors(layer, hidden)
    made = product(gate, up)
    if not torch.is_grad_enabled():
        return layer.down_proj(made)
    with saved_tensors_hooks(*_instead_of(made, gate, up, product)):
        return layer.down_proj(made)


def factors(layer: Any, hidden: Tensor) -> tuple[Tensor, Tensor]:
    """What the layer multiplies, before the activation of the first."""
    if hasattr(layer, "gate_up_proj"):
        gate, up = layer.gate_up_proj(hidden).chunk(2, dim=-1)
        return gate.contiguous(), up.contiguous()
    return layer.gate_proj(hidden), layer.up_proj(hidden)


def _instead_of(
    made: Tensor, gate: Tensor, up: Tensor, product: Product
) -> tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]]:
    """What to keep where `made` would be kept, and how to have it back."""
    place, size = _storage(made), made.numel()

    def pack(kept: Tensor) -> Any:
        same = _storage(kept) == place and kept.numel() == size
        return kept.shape if same and kept.is_contiguous() else kept

    def unpack(packed: Any) -> Tensor:
        if isinstance(packed, Tensor):
            return packed
        with torch.no_grad():
            return product(gate, up).view(packed)

    return pack, unpack


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


class OwnProduct(torch.autograd.Function):
    """act(gate) * up by torch's operators; backward applies the activation again."""

    @staticmethod
    def forward(
        ctx: Any, activation: Callable[[Tensor], Tensor], gate: Tensor, up: Tensor
    ) -> Tensor:
        ctx.save_for_backward(gate, up)
        ctx.activation = activation
        return activation(gate) * up

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, Tensor, Tensor]:
        gate, up = (item.detach().requires_grad_() for item in ctx.saved_tensors)
        with torch.enable_grad():
            product = ctx.activation(gate) * up
        of_gate, of_up = torch.autograd.grad(product, (gate, up), gradient)
        return None, of_gate, of_up
