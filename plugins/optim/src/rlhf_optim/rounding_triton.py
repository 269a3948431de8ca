"""The Triton kernel of `RoundedAdamW`: one launch per group, 14 bytes of traffic per weight."""

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from rlhf.engine import on_device

PIECE = 1 << 28
"""Elements of a piece; the place in it is a 32-bit counter of the random numbers."""
BYTES = 2
"""Of an element."""
BLOCK = 2048
ROUNDS = tl.constexpr(7)
"""Of Philox (Salmon et al., SC 2011): the smallest number that passes their tests of randomness."""
ALIGNED = 16
"""Bytes that are read and written at once if all tensors begin at a multiple of them."""


def update(
    tensors: Sequence[tuple[Tensor, ...]],
    *,
    factor: Tensor,
    seed: int,
    coefficients: Sequence[float],
) -> None:
    """Do what `rounding.update` does. The kernel knows the addresses of a piece of each tensor, its
    size and its first block: making views of them takes the host several times as long."""
    device = tensors[0][0].device
    rows: list[list[int]] = []
    blocks: list[int] = []
    first = 0
    for part in tensors:
        assert all(tensor.is_contiguous() for tensor in part)
        places, size = [tensor.data_ptr() for tensor in part], part[0].numel()
        for start in range(0, max(size, 1), PIECE):
            length = min(PIECE, size - start)
            rows.append([*(place + BYTES * start for place in places), length, first])
            blocks.append(-(-length // BLOCK))
            first += blocks[-1]
    table = on_device(rows, device)
    piece_of = torch.repeat_interleave(
        torch.arange(len(blocks), device=device, dtype=torch.int32),
        on_device(blocks, device),
        output_size=first,
    )
    aligned = all(place % ALIGNED == 0 for *places, _, _ in rows for place in places)
    _update[(first,)](
        table, piece_of, factor, seed, *coefficients, ALIGNED=aligned, BLOCK=BLOCK, num_warps=8
    )


@triton.jit(do_not_specialize=["seed"])
def _update(
    table, piece_of, factor, seed, one_minus_beta1, one_minus_beta2, eps, kept, rate, scale,
    ALIGNED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    block = tl.program_id(0)
    piece = tl.load(piece_of + block)
    row = table + piece * 6
    weight = _pointer(tl.load(row), ALIGNED)
    gradient = _pointer(tl.load(row + 1), ALIGNED)
    mean = _pointer(tl.load(row + 2), ALIGNED)
    square = _pointer(tl.load(row + 3), ALIGNED)
    start = (block - tl.load(row + 5).to(tl.int32)) * BLOCK
    rest = tl.load(row + 4).to(tl.int32) - start
    multiplier = tl.load(factor)
    # A whole block needs no mask, so 16 bytes are read and written at once.
    if multiplier == multiplier:
        if rest >= BLOCK:
            _move(
                weight, gradient, mean, square, start, rest, multiplier, seed + piece,
                one_minus_beta1, one_minus_beta2, eps, kept, rate, scale, MASKED=False, BLOCK=BLOCK,
            )  # fmt: skip
        else:
            _move(
                weight, gradient, mean, square, start, rest, multiplier, seed + piece,
                one_minus_beta1, one_minus_beta2, eps, kept, rate, scale, MASKED=True, BLOCK=BLOCK,
            )  # fmt: skip


@triton.jit
def _move(
    weight, gradient, mean, square, start, rest, factor, seed,
    one_minus_beta1, one_minus_beta2, eps, kept, rate, scale,
    MASKED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    # One draw of 128 bits is for two elements, half a block apart: 16 bits for each of 3 results.
    offset = tl.arange(0, BLOCK // 2)
    one, two, three, _ = tl.randint4x(seed, start + offset, ROUNDS)
    _move_half(
        weight, gradient, mean, square, start + offset, offset < rest if MASKED else None, factor,
        one, one >> 16, two, one_minus_beta1, one_minus_beta2, eps, kept, rate, scale,
    )  # fmt: skip
    offset += BLOCK // 2
    _move_half(
        weight, gradient, mean, square, start + offset, offset < rest if MASKED else None, factor,
        two >> 16, three, three >> 16, one_minus_beta1, one_minus_beta2, eps, kept, rate, scale,
    )  # fmt: skip


@triton.jit
def _move_half(
    weight, gradient, mean, square, place, inside, factor, one, two, three,
    one_minus_beta1, one_minus_beta2, eps, kept, rate, scale,
):  # fmt: skip
    grad = tl.load(gradient + place, mask=inside).to(tl.float32) * factor
    first = tl.load(mean + place, mask=inside).to(tl.float32)
    second = tl.load(square + place, mask=inside).to(tl.float32)
    value = tl.load(weight + place, mask=inside).to(tl.float32)
    first += one_minus_beta1 * (grad - first)
    second += one_minus_beta2 * (grad * grad - second)
    value = value * kept - rate * first / (tl.sqrt(second * scale) + eps)
    tl.store(mean + place, _rounded(first, one), mask=inside)
    tl.store(square + place, _rounded(second, two), mask=inside)
    tl.store(weight + place, _rounded(value, three), mask=inside)


@triton.jit
def _pointer(address, ALIGNED: tl.constexpr) -> Any:
    place = address.to(tl.pointer_type(tl.bfloat16))
    if ALIGNED:
        place = tl.multiple_of(place, 16)
    return place


@triton.jit
def _rounded(value, noise) -> Any:
    """Round float32 to a neighbour in bf16, the nearer one with the greater probability."""
    # bf16 is the upper half of float32: a carry from the lower half gives the neighbour.
    bits = value.to(tl.int32, bitcast=True) + (noise.to(tl.int32, bitcast=True) & 0xFFFF)
    return (bits & -65536).to(tl.float32, bitcast=True).to(tl.bfloat16)
