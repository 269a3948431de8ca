"""RMS norms (Zhang and Sennrich, arXiv 1910.07467) in one pass forward and one backward.

For x of H numbers and weight w, with r = 1 / sqrt(mean(x^2) + eps): y = r x w. Given the gradient g
of y: dx = r (g w - r x mean(g w r x)), and dw is the sum of g r x over all rows.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

ELEMENTS = 4096
"""Elements that a program reads at once, of several rows if they are narrow (heads)."""
PROGRAMS = 1024
"""Partial sums of the weight's gradient: several per multiprocessor, so that one reads while
another computes."""
WARPS = 8


class RMSNorm(torch.autograd.Function):
    """y [..., H] of x [..., H] and weight [H] + `offset` (0 or 1).

    With `whole` only the result is rounded to x's dtype (Gemma), else r x is rounded before it is
    multiplied by the weight (Llama). Backward computes in float32.
    """

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, eps: float, offset: float, whole: bool
    ) -> Tensor:
        rows = hidden.reshape(-1, hidden.shape[-1]).contiguous()
        output = torch.empty_like(rows)
        scale = torch.empty(len(rows), dtype=torch.float32, device=rows.device)
        block, at_once = tile_of(rows.shape[1])
        _forward[(triton.cdiv(len(rows), at_once),)](
            rows, weight, output, scale, len(rows), EPS=eps, OFFSET=offset,
            WIDTH=rows.shape[1], WHOLE=whole, ROWS=at_once, BLOCK=block, num_warps=WARPS,
        )  # fmt: skip
        ctx.save_for_backward(rows, weight, scale)
        ctx.offset = offset
        return output.view(hidden.shape)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        rows, weight, scale = ctx.saved_tensors
        block, at_once = tile_of(rows.shape[1])
        programs = min(PROGRAMS, triton.cdiv(len(rows), at_once))
        for_hidden = torch.empty_like(rows)
        parts = torch.empty(programs, rows.shape[1], dtype=torch.float32, device=rows.device)
        _backward[(programs,)](
            rows, weight, scale, gradient.reshape(rows.shape).contiguous(), for_hidden, parts,
            len(rows), programs, OFFSET=ctx.offset,
            WIDTH=rows.shape[1], ROWS=at_once, BLOCK=block, num_warps=WARPS,
        )  # fmt: skip
        for_weight = parts.sum(0).to(weight.dtype) if ctx.needs_input_grad[1] else None
        return for_hidden.view(gradient.shape), for_weight, None, None, None


def tile_of(width: int) -> tuple[int, int]:
    """Return the columns and rows that one program reads at once of rows of `width` numbers."""
    block = triton.next_power_of_2(width)
    return block, max(1, ELEMENTS // block)


# torch.compile passes Python floats to a kernel in 64 bits, unless they are constants.
@triton.jit
def _forward(
    hidden, weight, output, scales, rows, EPS: tl.constexpr, OFFSET: tl.constexpr,
    WIDTH: tl.constexpr, WHOLE: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    column = tl.arange(0, BLOCK)
    place = row[:, None] * WIDTH + column[None, :]
    inside = (row < rows)[:, None] & (column < WIDTH)[None, :]
    x = tl.load(hidden + place, mask=inside, other=0.0).to(tl.float32)
    scale = 1 / tl.sqrt(tl.sum(x * x, 1) / WIDTH + EPS)
    tl.store(scales + row, scale, mask=row < rows)
    x = x * scale[:, None]
    if not WHOLE:
        x = x.to(hidden.dtype.element_ty).to(tl.float32)
    w = tl.load(weight + column, mask=column < WIDTH, other=0.0).to(tl.float32) + OFFSET
    tl.store(output + place, (x * w[None, :]).to(output.dtype.element_ty), mask=inside)


@triton.jit
def _backward(
    hidden, weight, scales, gradient, change, parts, rows, programs, OFFSET: tl.constexpr,
    WIDTH: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    column = tl.arange(0, BLOCK)
    w = tl.load(weight + column, mask=column < WIDTH, other=0.0).to(tl.float32) + OFFSET
    of_weight = tl.zeros((BLOCK,), dtype=tl.float32)
    for tile in range(tl.program_id(0), tl.cdiv(rows, ROWS), programs):
        row = (tile * ROWS + tl.arange(0, ROWS)).to(tl.int64)
        place = row[:, None] * WIDTH + column[None, :]
        inside = (row < rows)[:, None] & (column < WIDTH)[None, :]
        scale = tl.load(scales + row, mask=row < rows, other=0.0)[:, None]
        x = tl.load(hidden + place, mask=inside, other=0.0).to(tl.float32) * scale
        g = tl.load(gradient + place, mask=inside, other=0.0).to(tl.float32)
        of_weight += tl.sum(g * x, 0)
        g = g * w[None, :]
        g = scale * (g - x * (tl.sum(g * x, 1) / WIDTH)[:, None])
        tl.store(change + place, g.to(change.dtype.element_ty), mask=inside)
    tl.store(parts + tl.program_id(0) * WIDTH + column, of_weight, mask=column < WIDTH)
