"""A packed row divided over the ranks of the mesh's sequence axis.

Each rank computes the layers for a part of the row's tokens. In attention the ranks exchange tokens
for heads, so that each has the whole row with a part of the heads, as in DeepSpeed-Ulysses (arXiv
2309.14509); the row's mask is that of one rank. After the last layer every rank gets the hidden
states of the whole row, and readouts compute what they do on one rank.
"""

from typing import Any

import torch
from torch import Tensor

from rlhf.engine import Axis, Mesh
from rlhf.errors import SameOnAllRanks


class Exchange(torch.autograd.Function):
    """Sends `values[n]` of [N, ...] to the n-th of N ranks, and returns what they sent, in their
    order. The gradient takes the same way back. Collective."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, axis: Axis) -> Tensor:
        ctx.axis = axis
        return _exchanged(values, axis)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return _exchanged(gradient, ctx.axis), None


def _exchanged(values: Tensor, axis: Axis) -> Tensor:
    values = values.contiguous()
    received = torch.empty_like(values)
    if not values.is_meta:  # In a rehearsal there are no ranks.
        torch.distributed.all_to_all_single(received, values, group=axis.group)
    return received


def part_of_rank(size: int, axis: Axis) -> slice:
    """Return which of `size` tokens or predictions this rank computes; all parts have the same
    size except for the last ones."""
    part = -(-size // axis.size)
    return slice(min(axis.rank * part, size), min((axis.rank + 1) * part, size))


def all_rows(part: Tensor, size: int, axis: Axis) -> Tensor:
    """Return all `size` rows of which each rank has its `part_of_rank` [n, ...]. The gradient of a
    part is the sum of all ranks' gradients. Collective."""
    if axis.size == 1:
        return part
    missing = -(-size // axis.size) - len(part)
    padded = torch.cat((part, part.new_zeros(missing, *part.shape[1:])))
    return Exchange.apply(padded.expand(axis.size, *padded.shape), axis).flatten(0, 1)[:size]


def to_heads(states: Tensor, axis: Axis, *, heads: int) -> Tensor:
    """Return the whole row of some heads, [1, h / N, T, D], of the rank's part of the row with all
    heads, [1, h, T / N, D]. KV heads are repeated, for `heads` query heads, until N divides them.
    Collective."""
    own, most = states.shape[1], heads // states.shape[1]
    copies = next(n for n in range(1, most + 1) if most % n == 0 == n * own % axis.size)
    states = states.squeeze(0).repeat_interleave(copies, dim=0)
    received = Exchange.apply(states.unflatten(0, (axis.size, -1)), axis)
    return received.transpose(0, 1).flatten(1, 2)[None]


def to_tokens(states: Tensor, axis: Axis) -> Tensor:
    """Return the rank's part of the row with all heads, [1, h, T / N, D], of the whole row of its
    heads, [1, h / N, T, D]. Collective."""
    parts = states.squeeze(0).unflatten(1, (axis.size, -1)).transpose(0, 1)
    return Exchange.apply(parts, axis).flatten(0, 1)[None]


def check_heads(architecture: Any, mesh: Mesh) -> None:
    """Raise RLHFError if the sequence axis does not divide the attention heads of a transformers
    configuration."""
    # Models without attention, such as Mamba 2, have no heads; `check_packed` refuses them.
    heads = getattr(architecture.get_text_config(), "num_attention_heads", 0)
    size = mesh.sequence.size
    if heads % size:
        allowed = [str(n) for n in range(1, heads + 1) if heads % n == 0 == mesh.shards.size % n]
        raise SameOnAllRanks(
            f"the model has {heads} attention heads, which {size} sequence ranks do not divide; "
            f"set sequence_parallel to {' or '.join(allowed)}"
        )
