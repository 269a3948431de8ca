"""The Triton kernels of log-probabilities: forward reads the logits once, and backward
overwrites them once with their gradient.

The normaliser is updated block by block of a row (Milakov and Gimelshein, arXiv 1805.02867), and so
is the entropy: with m the largest value so far and s = sum(exp(x - m)),
t = sum(exp(x - m) * (x - m)), a new largest value m' turns s into s * exp(m - m') and t into
(t + s * (m - m')) * exp(m - m').
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

COLUMNS = 4096
"""Logits of a row that are read at once."""
WARPS = 8


def read_rows(logits: Tensor, targets: Tensor, scale: float, softcap: float | None) -> Tensor:
    """Return normaliser, log-probability of the target, entropy and whether the target is the
    most likely token (the first of several): [4, n] in float32, of logits [n, V]."""
    rows, vocabulary = logits.shape
    output = torch.empty(4, rows, dtype=torch.float32, device=logits.device)
    if rows:
        _read[(rows,)](
            logits, targets, output, logits.stride(0), rows, scale, softcap or 1.0,
            VOCABULARY=vocabulary, CAPPED=softcap is not None, BLOCK=COLUMNS, num_warps=WARPS,
        )  # fmt: skip
    return output


def logit_gradient_(
    logits: Tensor,
    targets: Tensor,
    normaliser: Tensor,
    gradient: Tensor,
    scale: float,
    softcap: float | None,
) -> Tensor:
    """Overwrite logits [n, V] with their gradient, given the `gradient` [n] for the targets'
    log-probabilities."""
    rows, vocabulary = logits.shape
    if rows:
        _gradient[(rows, triton.cdiv(vocabulary, COLUMNS))](
            logits, targets, normaliser, gradient.contiguous(), logits.stride(0), scale,
            softcap or 1.0, VOCABULARY=vocabulary, CAPPED=softcap is not None,
            BLOCK=COLUMNS, num_warps=WARPS,
        )  # fmt: skip
    return logits


@triton.jit
def logit_value(raw, scale, cap, CAPPED: tl.constexpr) -> Any:
    x = raw.to(tl.float32) * scale
    if CAPPED:
        # tanh by the exponential, which is exact enough at both ends.
        x = cap * (1 - 2 / (tl.exp(2 * x / cap) + 1))
    return x


@triton.jit
def _read(
    logits, targets, output, stride, rows, scale, cap,
    VOCABULARY: tl.constexpr, CAPPED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    start = logits + row * stride
    target = tl.load(targets + row)
    most = float("-inf")
    most_likely = VOCABULARY
    total = 0.0
    tilted = 0.0
    for first in range(0, VOCABULARY, BLOCK):
        place = first + tl.arange(0, BLOCK)
        inside = place < VOCABULARY
        x = logit_value(tl.load(start + place, mask=inside, other=0.0), scale, cap, CAPPED)
        x = tl.where(inside, x, float("-inf"))
        here = tl.max(x, 0)
        nearest = tl.min(tl.where(x == here, place, VOCABULARY), 0)
        most_likely = tl.where(here > most, nearest, most_likely)
        new = tl.maximum(most, here)
        shrunk = tl.where(total > 0, tl.exp(most - new), 0.0)
        moved = tl.where(total > 0, total * (most - new), 0.0)
        exponential = tl.exp(x - new)
        tilted = (tilted + moved) * shrunk + tl.sum(
            tl.where(inside, exponential * (x - new), 0.0), 0
        )
        total = total * shrunk + tl.sum(exponential, 0)
        most = new
    normaliser = tl.log(total) + most
    at = logit_value(tl.load(start + target), scale, cap, CAPPED)
    tl.store(output + row, normaliser)
    tl.store(output + rows + row, at - normaliser)
    tl.store(output + 2 * rows + row, tl.log(total) - tilted / total)
    tl.store(output + 3 * rows + row, (most_likely == target).to(tl.float32))


@triton.jit
def _gradient(
    logits, targets, normaliser, gradient, stride, scale, cap,
    VOCABULARY: tl.constexpr, CAPPED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    place = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = place < VOCABULARY
    here = logits + row * stride + place
    x = logit_value(tl.load(here, mask=inside, other=0.0), scale, cap, CAPPED)
    change = tl.where(place == tl.load(targets + row), 1.0, 0.0)
    change -= tl.exp(x - tl.load(normaliser + row))
    change *= tl.load(gradient + row) * scale
    if CAPPED:
        change *= 1 - (x / cap) * (x / cap)
    tl.store(here, change.to(logits.dtype.element_ty), mask=inside)
