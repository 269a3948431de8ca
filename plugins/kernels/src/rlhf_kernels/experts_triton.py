"""Kernels between the grouped products of a mixture of experts.

Of a row's gates [2 I], the halves g and u, and the weight w of its choice: p = w act(g) u, where
act is SiLU, or GELU approximated by tanh, x sigmoid(2 sqrt(2 / pi) (x + 0.044715 x^3)). Given the
gradient d of p: dg = d w u act'(g), du = d w act(g) and dw = sum(d act(g) u).
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 1024
"""Elements of a row that a program holds at one time."""


def product(gates: Tensor, weights: Tensor, order: Tensor, *, gelu: bool) -> Tensor:
    """Return p [S, I] of gates [S, 2 I]; row i has the weight `order[i]` of weights [S]."""
    rows, width = len(gates), gates.shape[1] // 2
    result = gates.new_empty(rows, width)
    block = _block_of(width)
    _product[(rows, triton.cdiv(width, block))](
        gates, weights, order, result, WIDTH=width, GELU=gelu, BLOCK=block
    )
    return result


def product_gradient_(
    gates: Tensor, weights: Tensor, order: Tensor, gradient: Tensor, *, gelu: bool
) -> tuple[Tensor, Tensor]:
    """Overwrite gates [S, 2 I] with their gradient, given that of p [S, I]; return p, computed
    again, and the gradient of weights [S] in float32."""
    rows, width = gradient.shape
    result = gates.new_empty(rows, width)
    for_weights = torch.empty(rows, dtype=torch.float32, device=gates.device)
    _product_gradient[(rows,)](
        gates, weights, order, gradient, result, for_weights,
        WIDTH=width, GELU=gelu, BLOCK=_block_of(width),
    )  # fmt: skip
    return result, for_weights


def sum_choices(rows: Tensor, place: Tensor) -> Tensor:
    """Return [T, H]: for each token the sum, in float32, of its rows [S, H] at place [T, K]."""
    (tokens, choices), width = place.shape, rows.shape[1]
    result = rows.new_empty(tokens, width)
    block = _block_of(width)
    _sum_choices[(tokens, triton.cdiv(width, block))](
        rows, place, result, WIDTH=width, CHOICES=choices, BLOCK=block
    )
    return result


def _block_of(width: int) -> int:
    return min(BLOCK, triton.next_power_of_2(width))


@triton.jit
def _activation(gate, GELU: tl.constexpr):
    """Return act(gate) and its slope."""
    inner = gate
    slope = 1.0
    if GELU:
        inner = 1.5957691216057308 * (gate + 0.044715 * gate * gate * gate)
        slope = 1.5957691216057308 * (1 + 3 * 0.044715 * gate * gate)
    factor = tl.sigmoid(inner)
    return gate * factor, factor + gate * factor * (1 - factor) * slope


@triton.jit
def _product(
    gates, weights, order, result,
    WIDTH: tl.constexpr, GELU: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < WIDTH
    weight = tl.load(weights + tl.load(order + row)).to(tl.float32)
    of_gate = gates + row * (2 * WIDTH) + column
    gate = tl.load(of_gate, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(of_gate + WIDTH, mask=inside, other=0.0).to(tl.float32)
    value, _ = _activation(gate, GELU)
    value = weight * value * up
    tl.store(result + row * WIDTH + column, value.to(result.dtype.element_ty), mask=inside)


@triton.jit
def _product_gradient(
    gates, weights, order, gradient, result, for_weights,
    WIDTH: tl.constexpr, GELU: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    weight = tl.load(weights + tl.load(order + row)).to(tl.float32)
    of_weight = tl.zeros((BLOCK,), dtype=tl.float32)
    for start in range(0, WIDTH, BLOCK):
        column = start + tl.arange(0, BLOCK)
        inside = column < WIDTH
        of_gate = gates + row * (2 * WIDTH) + column
        gate = tl.load(of_gate, mask=inside, other=0.0).to(tl.float32)
        up = tl.load(of_gate + WIDTH, mask=inside, other=0.0).to(tl.float32)
        place = row * WIDTH + column
        change = tl.load(gradient + place, mask=inside, other=0.0).to(tl.float32)
        value, slope = _activation(gate, GELU)
        of_weight += change * value * up
        change = change * weight
        kind = gates.dtype.element_ty
        tl.store(result + place, (weight * value * up).to(kind), mask=inside)
        tl.store(of_gate, (change * up * slope).to(kind), mask=inside)
        tl.store(of_gate + WIDTH, (change * value).to(kind), mask=inside)
    tl.store(for_weights + row, tl.sum(of_weight, 0))


@triton.jit
def _sum_choices(
    rows, place, result, WIDTH: tl.constexpr, CHOICES: tl.constexpr, BLOCK: tl.constexpr
):
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < WIDTH
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    for choice in range(CHOICES):
        row = tl.load(place + token * CHOICES + choice).to(tl.int64)
        total += tl.load(rows + row * WIDTH + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(result + token * WIDTH + column, total.to(result.dtype.element_ty), mask=inside)
