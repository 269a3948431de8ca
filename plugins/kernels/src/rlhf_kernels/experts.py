"""Mixtures of experts by grouped products, with passes of our own between them.

A token x that chooses K experts e with weights w gives the sum of w down_e(act(gate_e x) up_e x).
transformers computes that by grouped products too. It multiplies what `down` returns by w, keeps
the rows that it has copied for each choice and all results, and adds gradients of the copies up by
`index_put`. Here w is multiplied into the narrower input of `down`, and the sum over a token's
choices is one kernel, forward and backward. Only tokens and gates are kept for backward: H + 2 K I
numbers a token.
"""

import copy
from functools import partial
from inspect import unwrap
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import grouped_mm

from rlhf.engine import replace_forward
from rlhf_kernels.gates import ACTIVATIONS

PARAMETERS = {"gate_up_proj", "down_proj"}
"""Of all experts of a layer: [E, 2 I, H] and [E, H, I]."""


def fuse_experts(decoder: nn.Module) -> int:
    """Have the experts of a decoder run `Experts` where it computes the same; return how many
    layers do."""
    activations = {layer: activation_of(layer) for layer in decoder.modules()}
    found = {layer: name for layer, name in activations.items() if name}
    for layer, name in found.items():
        replace_forward(layer, partial(_forward, layer, gelu=name == "gelu"))
    return len(found)


def activation_of(layer: nn.Module) -> str:
    """Return the activation of a layer that computes what `Experts` does: `silu`, or `gelu`
    approximated by tanh. Empty for any other layer. A few numbers sent through the layer's own
    code, with two small experts in it, tell."""
    if layer._parameters.keys() != PARAMETERS or layer._buffers:
        return ""
    draw = torch.Generator().manual_seed(0)
    gate_up, down, weights = (
        torch.randn(*shape, generator=draw, device="cpu")
        for shape in ((2, 16, 4), (2, 4, 8), (3, 2))
    )
    # Large values show a layer that limits them.
    hidden = torch.tensor([[1.0], [30.0], [1000.0]], device="cpu")
    hidden = hidden * torch.randn(3, 4, generator=draw, device="cpu")
    index = torch.tensor([[0, 1], [1, 0], [0, 1]], device="cpu")
    same: Any = copy.copy(layer)
    same.__dict__["_parameters"] = {"gate_up_proj": gate_up, "down_proj": down}
    same.__dict__["num_experts"] = 2
    with torch.no_grad():
        try:
            actual = unwrap(type(layer).forward)(same, hidden, index, weights)
        except Exception:  # A layer of another kind may need anything.
            return ""
        gate, up = torch.einsum("th,eih->tei", hidden, gate_up).chunk(2, dim=-1)
        for name, activation in ACTIVATIONS.items():
            each = torch.einsum("tei,ehi->teh", activation(gate) * up, down)
            chosen = each[torch.arange(3, device="cpu")[:, None], index]
            expected = (weights[..., None] * chosen).sum(1)
            if isinstance(actual, Tensor) and torch.allclose(actual, expected, rtol=1e-4):
                return name
    return ""


def _forward(layer: Any, hidden: Tensor, index: Tensor, weights: Tensor, *, gelu: bool) -> Tensor:
    gate_up, down = layer.gate_up_proj, layer.down_proj
    if torch.compiler.is_compiling() or not hidden.dtype == gate_up.dtype == down.dtype:
        own: Tensor = type(layer).forward(layer, hidden, index, weights)
        return own
    result: Tensor = Experts.apply(hidden, index, weights, gate_up, down, gelu)
    return result


class Experts(torch.autograd.Function):
    """[T, H] of tokens [T, H], the experts [T, K] that each has chosen, their weights [T, K], and
    the parameters gate_up [E, 2 I, H] and down [E, H, I]. Backward overwrites the gates."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        index: Tensor,
        weights: Tensor,
        gate_up: Tensor,
        down: Tensor,
        gelu: bool,
    ) -> Tensor:
        order, place, ends = _routes(index, len(gate_up))
        rows = hidden[order // index.shape[1]]
        gates = grouped_mm(rows, gate_up.transpose(-2, -1), offs=ends)
        del rows
        product = _product(gates, weights, order, gelu)
        outputs = grouped_mm(product, down.transpose(-2, -1), offs=ends)
        ctx.save_for_backward(hidden, weights, gate_up, down, gates, order, place, ends)
        ctx.gelu = gelu
        return _sum_choices(outputs, place)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weights, gate_up, down, gates, order, place, ends = ctx.saved_tensors
        for_gate_up = for_down = None
        token = order // place.shape[1]
        rows = gradient[token]
        change = grouped_mm(rows, down, offs=ends)
        product, for_weights = _product_gradient_(gates, weights, order, change, ctx.gelu)
        if ctx.needs_input_grad[4]:
            for_down = grouped_mm(rows.t(), product, offs=ends)
        del rows, change, product
        if ctx.needs_input_grad[3]:
            for_gate_up = grouped_mm(gates.t(), hidden[token], offs=ends)
        for_hidden = _sum_choices(grouped_mm(gates, gate_up, offs=ends), place)
        for_weights = for_weights[place].to(weights.dtype)
        return for_hidden, None, for_weights, for_gate_up, for_down, None


def _routes(index: Tensor, num_experts: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return the order [S] of the choices [T, K] by expert, the place [T, K] of each choice in it,
    and where each expert's choices end [E]."""
    expert, order = torch.sort(index.flatten().short(), stable=True)
    each = torch.arange(len(order), device=order.device)
    place = torch.empty_like(order).scatter_(0, order, each).view(index.shape)
    experts = torch.arange(num_experts, device=order.device, dtype=expert.dtype)
    ends = torch.searchsorted(expert, experts, right=True, out_int32=True)
    return order, place, ends


def _product(gates: Tensor, weights: Tensor, order: Tensor, gelu: bool) -> Tensor:
    if gates.is_meta:
        return gates.new_empty(len(gates), gates.shape[1] // 2)
    from rlhf_kernels.experts_triton import product

    return product(gates, weights.contiguous(), order, gelu=gelu)


def _product_gradient_(
    gates: Tensor, weights: Tensor, order: Tensor, change: Tensor, gelu: bool
) -> tuple[Tensor, Tensor]:
    if gates.is_meta:
        return torch.empty_like(change), gates.new_empty(len(gates), dtype=torch.float32)
    from rlhf_kernels.experts_triton import product_gradient_

    return product_gradient_(gates, weights.contiguous(), order, change, gelu=gelu)


def _sum_choices(rows: Tensor, place: Tensor) -> Tensor:
    if rows.is_meta:
        return rows.new_empty(len(place), rows.shape[1])
    from rlhf_kernels.experts_triton import sum_choices

    return sum_choices(rows, place)
