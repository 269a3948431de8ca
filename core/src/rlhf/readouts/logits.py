"""A chunk of logits: what is read off each row, and the derivative that goes back.

On an accelerator with Triton each is one pass over the logits in their own dtype; elsewhere it is a
few operators of torch in float32. Both give the same numbers but for rounding, and on ties of the
likeliest token.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from rlhf.engine import fused_on

CHUNK = 2048
"""Rows of logits at the same time without fused kernels: 1.2 GiB in float32 at a vocabulary of
152k."""
FUSED_BYTES = 5 << 27
"""Bytes of logits at the same time with them, in blocks of `BLOCK` rows: 2,048 rows in 16 bits at a
vocabulary of 152k."""
BLOCK = 256


class Read(NamedTuple):
    """Of n rows, each [n] in float32."""

    normaliser: Tensor
    """The log of the softmax's denominator."""
    logprobs: Tensor
    """Of the target."""
    entropy: Tensor
    """In nats."""
    correct: Tensor
    """1 where the likeliest token is the target."""


def rows_at_once(weight: Tensor) -> int:
    """How many rows of logits of the head `weight` [V, H] should exist at the same time."""
    if not fused_on(weight.device.type):
        return CHUNK
    rows = FUSED_BYTES // (weight.shape[0] * weight.element_size())
    return max(BLOCK, rows // BLOCK * BLOCK)


def round_up(rows: int, device: torch.device) -> int:
    """The number of rows for which products with a head are computed on `device`.

    For each new shape the library may load another kernel, for which the host waits until the
    device is idle; with as many rows as predictions most steps that were traced had such a wait.
    """
    return -(-rows // BLOCK) * BLOCK if fused_on(device.type) else rows


def pad_rows(tensor: Tensor, rows: int) -> Tensor:
    """`tensor` [n] or [n, m] with zeros behind it, up to so many `rows`."""
    return torch.nn.functional.pad(tensor, (0, 0) * (tensor.dim() - 1) + (0, rows - len(tensor)))


def each_chunk(
    act: Callable[[slice, Tensor], None],
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    chunk: int,
) -> None:
    """`act(rows, logits)` for every `chunk` rows of hidden states [N, H] and their raw logits
    [n, V]. They are held by `act` alone, so that one chunk is gone before the next is made."""
    for start in range(0, len(hidden), chunk):
        rows = slice(start, min(start + chunk, len(hidden)))
        act(rows, torch.nn.functional.linear(hidden[rows], weight, bias))


def read(logits: Tensor, targets: Tensor, *, scale: float, softcap: float | None) -> Read:
    """Of raw logits [n, V], which this may overwrite, with x = cap(scale * logits)."""
    if fused_on(logits.device.type):
        if logits.is_meta:
            return Read(*logits.new_empty(4, len(logits), dtype=torch.float32))
        from rlhf.readouts.logits_triton import read_rows

        return Read(*read_rows(logits, targets, scale, softcap))
    values = capped(scaled(logits, scale), softcap)
    likeliest, found = values.max(-1)
    target = values.gather(-1, targets[:, None]).squeeze(-1)
    shifted = values.sub_(likeliest[:, None])
    exponentials = shifted.exp()
    total = exponentials.sum(-1)
    normaliser = total.log() + likeliest
    entropy = total.log() - exponentials.mul_(shifted).sum(-1) / total
    return Read(normaliser, target - normaliser, entropy, (found == targets).float())


def overwrites(logits: Tensor) -> bool:
    """Whether `read` destroys these logits."""
    return logits.dtype == torch.float32 and not fused_on(logits.device.type)


def pull(
    logits: Tensor,
    targets: Tensor,
    normaliser: Tensor,
    gradient: Tensor,
    *,
    scale: float,
    softcap: float | None,
) -> Tensor:
    """The derivative by raw logits [n, V], in their dtype, of the targets' log-probabilities
    weighted by `gradient` [n]. Overwrites the logits."""
    if fused_on(logits.device.type):
        if logits.is_meta:
            return logits
        from rlhf.readouts.logits_triton import pull_rows_

        return pull_rows_(logits, targets, normaliser, gradient, scale, softcap)
    values = capped(scaled(logits, scale), softcap)
    slope = None if softcap is None else 1 - (values / softcap).square_()
    change = values.sub_(normaliser[:, None]).exp_().neg_()
    places = targets[:, None]
    change.scatter_add_(-1, places, torch.ones_like(places, dtype=change.dtype))
    change.mul_(gradient[:, None] * scale)
    if slope is not None:
        change.mul_(slope)
    return change.to(logits.dtype)


def scaled(logits: Tensor, scale: float) -> Tensor:
    """scale * logits in float32; where they are that already, in place."""
    return logits.float() if scale == 1.0 else logits.float().mul_(scale)


def capped(values: Tensor, softcap: float | None) -> Tensor:
    """softcap * tanh(x / softcap), in place."""
    if softcap is None:
        return values
    return values.div_(softcap).tanh_().mul_(softcap)
