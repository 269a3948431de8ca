"""Rotary embeddings of queries and keys in one launch forward and one backward.

Forward and formula as `rotary.Formula` has them. Given the gradient g of y, with a' for the numbers
of the other channel: dx_c = g_c cos_a - s g_b sin_a'. Computed in float32, rounded once.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

WARPS = 4


class Rotate(torch.autograd.Function):
    """Queries [B, H, T, C] and keys [B, K, T, C], rotated by cos and sin [B or 1, T, R]. In the
    results the heads of a token are adjacent in memory, as projections leave them."""

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, cos: Tensor, sin: Tensor,
        rotated: int, neighbours: bool, shared: bool,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        cos, sin = cos.contiguous(), sin.contiguous()
        ctx.save_for_backward(cos, sin)
        ctx.formula = rotated, neighbours, shared
        return rotate(query, key, cos, sin, *ctx.formula, backward=False)

    @staticmethod
    def backward(ctx: Any, for_query: Tensor, for_key: Tensor) -> tuple[Tensor | None, ...]:
        cos, sin = ctx.saved_tensors
        found = rotate(for_query, for_key, cos, sin, *ctx.formula, backward=True)
        return *found, None, None, None, None, None


def rotate(
    query: Tensor, key: Tensor, cos: Tensor, sin: Tensor,
    rotated: int, neighbours: bool, shared: bool, *, backward: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Rotate queries and keys, or their gradients if `backward`."""
    rows, heads, tokens, channels = query.shape
    query, key = (one if one.stride(-1) == 1 else one.contiguous() for one in (query, key))
    results = [
        torch.empty_like(one.transpose(1, 2), memory_format=torch.contiguous_format)
        for one in (query, key)
    ]
    _rotate[(tokens, rows)](
        query, key, *results, cos, sin, *query.stride()[:3], *key.stride()[:3], tokens,
        0 if len(cos) == 1 else cos.stride(0), HEADS=heads, KEY_HEADS=key.shape[1],
        CHANNELS=channels, ROTATED=rotated, NUMBERS=cos.shape[-1],
        NEIGHBOURS=neighbours, SHARED=shared, BACKWARD=backward,
        BLOCK=triton.next_power_of_2(channels), HEADS_BLOCK=triton.next_power_of_2(heads),
        KEY_HEADS_BLOCK=triton.next_power_of_2(key.shape[1]), num_warps=WARPS,
    )  # fmt: skip
    queries, keys = (one.transpose(1, 2) for one in results)
    return queries, keys


@triton.jit
def _rotate(
    query, key, queries, keys, cos, sin, query_row, query_head, query_token, key_row, key_head,
    key_token, tokens, number_row, HEADS: tl.constexpr, KEY_HEADS: tl.constexpr,
    CHANNELS: tl.constexpr, ROTATED: tl.constexpr, NUMBERS: tl.constexpr,
    NEIGHBOURS: tl.constexpr, SHARED: tl.constexpr, BACKWARD: tl.constexpr, BLOCK: tl.constexpr,
    HEADS_BLOCK: tl.constexpr, KEY_HEADS_BLOCK: tl.constexpr,
):  # fmt: skip
    token, row = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    channel = tl.arange(0, BLOCK)
    turned = channel < ROTATED
    if NEIGHBOURS:
        second, pair, other = channel % 2 == 1, channel // 2, channel ^ 1
    else:
        second, pair = channel >= ROTATED // 2, channel % (ROTATED // 2)
        other = tl.where(second, channel - ROTATED // 2, channel + ROTATED // 2)
    at, at_other = (pair, pair) if SHARED else (channel, other)
    start = row * number_row + token * NUMBERS
    c = tl.load(cos + start + at, mask=turned, other=1.0).to(tl.float32)
    if BACKWARD:
        s = -tl.load(sin + start + at_other, mask=turned, other=0.0).to(tl.float32)
    else:
        s = tl.load(sin + start + at, mask=turned, other=0.0).to(tl.float32)
    s = tl.where(second, s, -s)
    query += row * query_row + token * query_token
    queries += (row * tokens + token) * HEADS * CHANNELS
    _heads(query, query_head, queries, c, s, channel, other, turned, HEADS, CHANNELS, HEADS_BLOCK)
    key += row * key_row + token * key_token
    keys += (row * tokens + token) * KEY_HEADS * CHANNELS
    _heads(key, key_head, keys, c, s, channel, other, turned, KEY_HEADS, CHANNELS, KEY_HEADS_BLOCK)


@triton.jit
def _heads(
    given, head_stride, output, c, s, channel, other, turned, HEADS: tl.constexpr,
    CHANNELS: tl.constexpr, HEADS_BLOCK: tl.constexpr,
):  # fmt: skip
    """Rotate the heads of a token."""
    head = tl.arange(0, HEADS_BLOCK)[:, None]
    real = (head < HEADS) & (channel < CHANNELS)[None, :]
    start = given + head.to(tl.int64) * head_stride
    x = tl.load(start + channel[None, :], mask=real, other=0.0).to(tl.float32)
    b = tl.load(start + other[None, :], mask=real & turned[None, :], other=0.0).to(tl.float32)
    y = (x * c[None, :] + b * s[None, :]).to(output.dtype.element_ty)
    tl.store(output + head * CHANNELS + channel[None, :], y, mask=real)
