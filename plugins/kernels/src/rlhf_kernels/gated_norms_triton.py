"""RMS norms with a gate in one pass forward and one backward.

For x of H numbers, weight w and gate z, with r = 1 / sqrt(mean(x^2) + eps): y = r x w act(z), where
act is SiLU or the sigmoid. Given the gradient g of y, with h = g act(z): dz = g r x w act'(z),
dx = r (h w - r x mean(h w r x)), and dw is the sum of h r x over all rows.

Mamba 2 multiplies by the gate first: y is the norm of u = x act(z). Then dx = du act(z) and
dz = du x act'(z), where du and dw are those of an RMS norm of u.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from rlhf_kernels.norms_triton import ELEMENTS, PROGRAMS, WARPS, tile_of

WIDE_WARPS = 16
"""Of a program that reads a row of more than `ELEMENTS`, which would not fit into the registers of
8 together with its gate."""


class GatedRMSNorm(torch.autograd.Function):
    """y [N, H] of x [N, H], gate [N, H] and weight [H]. Rows may have gaps between them.

    A row is normed in `groups` equal parts. `first` applies the gate before the norm, and `sigmoid`
    takes the sigmoid of the gate instead of SiLU. With `whole` only the result is rounded to x's
    dtype, else each factor of the result is, but not the activation. Backward computes in float32.
    """

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, gate: Tensor, weight: Tensor,
        eps: float, groups: int, sigmoid: bool, first: bool, whole: bool,
    ) -> Tensor:  # fmt: skip
        rows, width = len(hidden), hidden.shape[1] // groups
        output = torch.empty(hidden.shape, dtype=hidden.dtype, device=hidden.device)
        scale = torch.empty(rows, groups, dtype=torch.float32, device=hidden.device)
        block, at_once = tile_of(width)
        _forward[(triton.cdiv(rows, at_once), groups)](
            hidden, gate, weight, output, scale, rows, hidden.stride(0), gate.stride(0),
            EPS=eps, SIGMOID=sigmoid, FIRST=first, WHOLE=whole,
            WIDTH=width, GROUPS=groups, ROWS=at_once, BLOCK=block, num_warps=_warps(block),
        )  # fmt: skip
        ctx.save_for_backward(hidden, gate, weight, scale)
        ctx.sigmoid, ctx.first = sigmoid, first
        return output

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        hidden, gate, weight, scale = ctx.saved_tensors
        rows, groups = scale.shape
        width = hidden.shape[1] // groups
        block, at_once = tile_of(width)
        programs = max(1, min(PROGRAMS // groups, triton.cdiv(rows, at_once)))
        for_hidden = torch.empty(hidden.shape, dtype=hidden.dtype, device=hidden.device)
        for_gate = torch.empty(gate.shape, dtype=gate.dtype, device=gate.device)
        parts = torch.empty(programs, hidden.shape[1], dtype=torch.float32, device=hidden.device)
        _backward[(programs, groups)](
            hidden, gate, weight, scale, gradient.contiguous(), for_hidden, for_gate, parts,
            rows, programs, hidden.stride(0), gate.stride(0),
            SIGMOID=ctx.sigmoid, FIRST=ctx.first,
            WIDTH=width, GROUPS=groups, ROWS=at_once, BLOCK=block, num_warps=_warps(block),
        )  # fmt: skip
        for_weight = parts.sum(0).to(weight.dtype) if ctx.needs_input_grad[2] else None
        return for_hidden, for_gate, for_weight, None, None, None, None, None


def _warps(block: int) -> int:
    return WARPS if block <= ELEMENTS else WIDE_WARPS


# torch.compile passes Python floats to a kernel in 64 bits, unless they are constants.
@triton.jit
def _forward(
    hidden, gate, weight, output, scales, rows, hidden_pitch, gate_pitch,
    EPS: tl.constexpr, SIGMOID: tl.constexpr, FIRST: tl.constexpr, WHOLE: tl.constexpr,
    WIDTH: tl.constexpr, GROUPS: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    inside = (row < rows)[:, None] & (tl.arange(0, BLOCK) < WIDTH)[None, :]
    column = tl.program_id(1) * WIDTH + tl.arange(0, BLOCK)
    place = row[:, None] * (GROUPS * WIDTH) + column[None, :]
    of_hidden = hidden + row[:, None] * hidden_pitch + column[None, :]
    of_gate = gate + row[:, None] * gate_pitch + column[None, :]
    x = tl.load(of_hidden, mask=inside, other=0.0).to(tl.float32)
    z = tl.load(of_gate, mask=inside, other=0.0).to(tl.float32)
    factor = tl.sigmoid(z)
    if not SIGMOID:
        factor = factor * z
    if FIRST:
        x = x * factor
    scale = 1 / tl.sqrt(tl.sum(x * x, 1) / WIDTH + EPS)
    tl.store(scales + row * GROUPS + tl.program_id(1), scale, mask=row < rows)
    x = x * scale[:, None]
    if not WHOLE:
        x = x.to(hidden.dtype.element_ty).to(tl.float32)
    w = tl.load(weight + column, mask=tl.arange(0, BLOCK) < WIDTH, other=0.0).to(tl.float32)
    x = x * w[None, :]
    if not FIRST:
        if not WHOLE:
            x = x.to(hidden.dtype.element_ty).to(tl.float32)
        x = x * factor
    tl.store(output + place, x.to(output.dtype.element_ty), mask=inside)


@triton.jit
def _backward(
    hidden, gate, weight, scales, gradient, for_hidden, for_gate, parts,
    rows, programs, hidden_pitch, gate_pitch, SIGMOID: tl.constexpr, FIRST: tl.constexpr,
    WIDTH: tl.constexpr, GROUPS: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    within = tl.arange(0, BLOCK) < WIDTH
    column = tl.program_id(1) * WIDTH + tl.arange(0, BLOCK)
    w = tl.load(weight + column, mask=within, other=0.0).to(tl.float32)
    of_weight = tl.zeros((BLOCK,), dtype=tl.float32)
    for tile in range(tl.program_id(0), tl.cdiv(rows, ROWS), programs):
        row = (tile * ROWS + tl.arange(0, ROWS)).to(tl.int64)
        inside = (row < rows)[:, None] & within[None, :]
        place = row[:, None] * (GROUPS * WIDTH) + column[None, :]
        of_hidden = hidden + row[:, None] * hidden_pitch + column[None, :]
        of_gate = gate + row[:, None] * gate_pitch + column[None, :]
        of_row = scales + row * GROUPS + tl.program_id(1)
        scale = tl.load(of_row, mask=row < rows, other=0.0)[:, None]
        x = tl.load(of_hidden, mask=inside, other=0.0).to(tl.float32)
        z = tl.load(of_gate, mask=inside, other=0.0).to(tl.float32)
        g = tl.load(gradient + place, mask=inside, other=0.0).to(tl.float32)
        factor = tl.sigmoid(z)
        slope = factor * (1 - factor)
        if not SIGMOID:
            slope = factor + z * slope
            factor = factor * z
        normed = x * scale
        if FIRST:
            normed = normed * factor
        else:
            z = g * normed * w[None, :] * slope
            g = g * factor
        of_weight += tl.sum(g * normed, 0)
        g = g * w[None, :]
        g = scale * (g - normed * (tl.sum(g * normed, 1) / WIDTH)[:, None])
        if FIRST:
            z = g * x * slope
            g = g * factor
        tl.store(for_hidden + place, g.to(for_hidden.dtype.element_ty), mask=inside)
        tl.store(for_gate + place, z.to(for_gate.dtype.element_ty), mask=inside)
    place = tl.program_id(0) * (GROUPS * WIDTH) + column
    tl.store(parts + place, of_weight, mask=within)
