"""Short convolutions of recurrent layers along the paths of a packed row's trees, with their
activation, in one pass forward and two backward.

For a token t with the weights w_0 to w_n of a channel and the bias b: z_t = b + sum over k of
w_(n-k) x_(t,k), where (t, k) is the token k steps before t on its path, and y_t = z_t, or SiLU(z_t)
= z_t sigmoid(z_t). Given the gradient g of y: h_t = g_t y'(z_t), dw_(n-k) = sum over t of
h_t x_(t,k), db = sum of h_t, and dx_s = sum over all t and k with (t, k) = s of w_(n-k) h_t.
"""

from functools import partial
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from rlhf_kernels.paths import Links, Segment, links_of

ROWS, CHANNELS = 32, 128
"""Tokens and channels that a program computes at once."""
TILE, TILE_CHANNELS = 8, 64
"""Those of a program of the weight's gradient, which keeps sums for each."""
PROGRAMS = 128
"""Partial sums over tokens of the weight's gradient."""
WIDEST = 4
"""The largest width."""
SILU = ("silu", "swish")


def convolve(
    hidden_states: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str | None = None,
    links: Links | None = None,
) -> Tensor:
    """Return the convolution of `hidden_states` [1, C, T] with `weight` [C, width] and `bias` [C]
    along the paths that `links` describe, or of one path. Raises ValueError for an activation other
    than SiLU and a width above 4."""
    if activation not in (None, *SILU):
        raise ValueError(f"no kernel has the activation {activation}")
    if weight.shape[1] > WIDEST:
        raise ValueError(f"no kernel has the width {weight.shape[1]}")
    rows = hidden_states.squeeze(0).mT
    if links is None:
        segments = [Segment(range(len(rows)), None)]
        as_tensor = partial(torch.tensor, device=rows.device)
        links = links_of(segments, weight.shape[1] - 1, as_tensor)
    output: Tensor = PathConvolution.apply(rows, weight, bias, activation is not None, links)
    return output.mT[None]


class PathConvolution(torch.autograd.Function):
    """y [T, C] of x [T, C], weight [C, width] and bias [C] or None. Sums are float32."""

    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, weight: Tensor, bias: Tensor | None, silu: bool, links: Links
    ) -> Tensor:
        rows, weight = rows if rows.stride(1) == 1 else rows.contiguous(), weight.contiguous()
        output = torch.empty_like(rows, memory_format=torch.contiguous_format)
        tokens, channels = rows.shape
        grid = triton.cdiv(tokens, ROWS), triton.cdiv(channels, CHANNELS)
        _forward[grid](
            rows, weight, bias, links.before, output, tokens, channels, rows.stride(0),
            WIDTH=weight.shape[1], BIAS=bias is not None, SILU=silu, ROWS=ROWS, BLOCK=CHANNELS,
        )  # fmt: skip
        ctx.save_for_backward(rows, weight, bias)
        ctx.silu, ctx.links = silu, links
        return output

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        rows, weight, bias = ctx.saved_tensors
        links, (channels, width) = ctx.links, weight.shape
        tokens = len(rows)
        programs = min(PROGRAMS, triton.cdiv(tokens, TILE))
        change = torch.empty_like(rows, memory_format=torch.contiguous_format)
        parts = rows.new_empty(programs, width + 1, channels, dtype=torch.float32)
        _backward[programs, triton.cdiv(channels, TILE_CHANNELS)](
            rows, weight, bias, links.before, gradient.contiguous(), change, parts,
            tokens, channels, rows.stride(0), programs, WIDTH=width, BIAS=bias is not None,
            SILU=ctx.silu, ROWS=TILE, BLOCK=TILE_CHANNELS,
        )  # fmt: skip
        for_rows = torch.empty_like(change)
        _scatter[triton.cdiv(tokens, ROWS), triton.cdiv(channels, CHANNELS)](
            change, weight, links.before, links.later, links.offsets, for_rows, tokens, channels,
            WIDTH=width, ROWS=ROWS, BLOCK=CHANNELS,
        )  # fmt: skip
        sums = parts.sum(0).to(weight.dtype)
        return for_rows, sums[:width].mT, None if bias is None else sums[width], None, None


@triton.jit
def _factor(weight, column, channels, step, WIDTH: tl.constexpr):
    """Return the weights of the tokens `step` steps before [1, BLOCK]; 0 from the width on."""
    place = weight + column * WIDTH + WIDTH - 1 - step
    inside = (column < channels) & (step < WIDTH)
    return tl.load(place, mask=inside, other=0.0).to(tl.float32)[None, :]


@triton.jit
def _earlier(
    hidden, before, row, column, tokens, channels, stride, step: tl.constexpr, WIDTH: tl.constexpr
):
    """Return x of the tokens `step` steps before [ROWS, BLOCK]; 0 from the width on."""
    if step == 0:
        place = tl.where(row < tokens, row, -1)
    else:
        there = (row < tokens) & (step < WIDTH)
        place = tl.load(before + (step - 1) * tokens + row, mask=there, other=-1)
    inside = (place >= 0)[:, None] & (column < channels)[None, :]
    place = hidden + place.to(tl.int64)[:, None] * stride + column[None, :]
    return tl.load(place, mask=inside, other=0.0).to(tl.float32)


@triton.jit
def _bias(bias, column, channels, BIAS: tl.constexpr, BLOCK: tl.constexpr):
    if BIAS:
        return tl.load(bias + column, mask=column < channels, other=0.0).to(tl.float32)[None, :]
    return tl.zeros((1, BLOCK), tl.float32)


@triton.jit
def _forward(
    hidden, weight, bias, before, output, tokens, channels, stride, WIDTH: tl.constexpr,
    BIAS: tl.constexpr, SILU: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    sums = _bias(bias, column, channels, BIAS, BLOCK)
    for step in tl.static_range(WIDTH):
        x = _earlier(hidden, before, row, column, tokens, channels, stride, step, WIDTH)
        sums = sums + x * _factor(weight, column, channels, step, WIDTH)
    if SILU:
        sums = sums * tl.sigmoid(sums)
    inside = (row < tokens)[:, None] & (column < channels)[None, :]
    place = output + row.to(tl.int64)[:, None] * channels + column[None, :]
    tl.store(place, sums.to(output.dtype.element_ty), mask=inside)


@triton.jit
def _backward(
    hidden, weight, bias, before, gradient, change, parts, tokens, channels, stride, programs,
    WIDTH: tl.constexpr, BIAS: tl.constexpr, SILU: tl.constexpr, ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Write h, and for the gradients of the weight's columns and of the bias the sums over this
    program's tokens."""
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    w0 = _factor(weight, column, channels, 0, WIDTH)
    w1 = _factor(weight, column, channels, 1, WIDTH)
    w2 = _factor(weight, column, channels, 2, WIDTH)
    w3 = _factor(weight, column, channels, 3, WIDTH)
    b = _bias(bias, column, channels, BIAS, BLOCK)
    # Each place keeps a sum of its own, and they are added up once.
    for_b = tl.zeros((ROWS, BLOCK), tl.float32)
    for_w0 = tl.zeros((ROWS, BLOCK), tl.float32)
    for_w1 = tl.zeros((ROWS, BLOCK), tl.float32)
    for_w2 = tl.zeros((ROWS, BLOCK), tl.float32)
    for_w3 = tl.zeros((ROWS, BLOCK), tl.float32)
    for tile in range(tl.program_id(0), tl.cdiv(tokens, ROWS), programs):
        row = tile * ROWS + tl.arange(0, ROWS)
        inside = (row < tokens)[:, None] & (column < channels)[None, :]
        place = row.to(tl.int64)[:, None] * channels + column[None, :]
        g = tl.load(gradient + place, mask=inside, other=0.0).to(tl.float32)
        x0 = _earlier(hidden, before, row, column, tokens, channels, stride, 0, WIDTH)
        x1 = _earlier(hidden, before, row, column, tokens, channels, stride, 1, WIDTH)
        x2 = _earlier(hidden, before, row, column, tokens, channels, stride, 2, WIDTH)
        x3 = _earlier(hidden, before, row, column, tokens, channels, stride, 3, WIDTH)
        if SILU:
            sums = b + x0 * w0 + x1 * w1 + x2 * w2 + x3 * w3
            share = tl.sigmoid(sums)
            g = g * share * (1 + sums * (1 - share))
        tl.store(change + place, g.to(change.dtype.element_ty), mask=inside)
        for_b += g
        for_w0 += g * x0
        for_w1 += g * x1
        for_w2 += g * x2
        for_w3 += g * x3
    place = parts + tl.program_id(0) * (WIDTH + 1) * channels + column
    real = column < channels
    tl.store(place + (WIDTH - 1) * channels, tl.sum(for_w0, 0), mask=real)
    tl.store(place + (WIDTH - 2) * channels, tl.sum(for_w1, 0), mask=real & (WIDTH > 1))
    tl.store(place + (WIDTH - 3) * channels, tl.sum(for_w2, 0), mask=real & (WIDTH > 2))
    tl.store(place + (WIDTH - 4) * channels, tl.sum(for_w3, 0), mask=real & (WIDTH > 3))
    tl.store(place + WIDTH * channels, tl.sum(for_b, 0), mask=real)


@triton.jit
def _scatter(
    change, weight, before, later, offsets, output, tokens, channels, WIDTH: tl.constexpr,
    ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write dx of h."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    real = (column < channels)[None, :]
    inside = (row < tokens)[:, None] & real
    place = row.to(tl.int64)[:, None] * channels + column[None, :]
    sums = tl.load(change + place, mask=inside, other=0.0).to(tl.float32)
    sums = sums * _factor(weight, column, channels, 0, WIDTH)
    for step in tl.static_range(1, WIDTH):
        after = row + step
        source = tl.load(before + (step - 1) * tokens + after, mask=after < tokens, other=-1)
        follows = (source == row)[:, None] & inside
        g = tl.load(change + place + step * channels, mask=follows, other=0.0).to(tl.float32)
        sums += g * _factor(weight, column, channels, step, WIDTH)
    start = tl.load(offsets + row, mask=row < tokens, other=0)
    count = tl.load(offsets + row + 1, mask=row < tokens, other=0) - start
    for number in range(tl.max(count, 0)):
        there = number < count
        entry = tl.load(later + start + number, mask=there, other=0)
        at = change + (entry // WIDTH).to(tl.int64)[:, None] * channels + column[None, :]
        g = tl.load(at, mask=there[:, None] & real, other=0.0).to(tl.float32)
        at = weight + column[None, :] * WIDTH + WIDTH - 1 - (entry % WIDTH)[:, None]
        sums += g * tl.load(at, mask=there[:, None] & real, other=0.0).to(tl.float32)
    tl.store(output + place, sums.to(output.dtype.element_ty), mask=inside)
