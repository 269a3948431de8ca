"""The scan of Mamba 2 (Dao and Gu, arXiv 2405.21060) as gated linear attention with one decay for
each head (Yang et al., arXiv 2312.06635), of which flash-linear-attention has the parts.

With the states of a head S_t = exp(A d_t) S_(t-1) + d_t x_t B_t' and y_t = S_t C_t + D x_t: C are
queries, B keys, d x values, and A d the logarithms of decays.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import softplus

from rlhf_kernels.paths import CHUNK

LOG2_E = 1 / math.log(2)
"""The library's kernels take powers of 2."""


class Parts(NamedTuple):
    """The parts of gated linear attention, of which each is a function of flash-linear-attention:
    sums of the decays' logarithms within chunks, the states before chunks and the final ones, the
    output of these, and in backward the gradients of the states, those of queries, keys and sums,
    and those of values. They take sequences of a row end to end."""

    sums: Callable[..., Tensor]
    states: Callable[..., tuple[Tensor, Tensor | None]]
    output: Callable[..., Tensor]
    for_states: Callable[..., tuple[Tensor, Tensor | None]]
    for_inputs: Callable[..., tuple[Tensor, Tensor, Any, Tensor]]
    for_values: Callable[..., Tensor]


def by_linear_attention(
    parts: Parts,
    hidden_states: Tensor,
    dt: Tensor,
    A: Tensor,  # noqa: N803
    B: Tensor,  # noqa: N803
    C: Tensor,  # noqa: N803
    chunk_size: int,
    D: Tensor | None = None,  # noqa: N803
    dt_bias: Tensor | None = None,
    initial_states: Tensor | None = None,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] = (0.0, float("inf")),
    return_final_states: bool = False,
    cu_seqlens: Tensor | None = None,
    chunk_indices: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, Tensor | None]:
    """Return the output [1, T, H, P] and the final states [S, H, P, N] or None of transformers'
    `mamba2_chunk_scan` for `hidden_states` [1, T, H, P], dt [1, T, H], A [H], B and C
    [1, T, G, N]. `cu_seqlens` and `chunk_indices` are as `ends_of` gives them."""
    if dt_bias is not None:
        dt = dt + dt_bias.to(dt.dtype)
    if dt_softplus:
        dt = softplus(dt)
    dt = dt.clamp(*dt_limit).float()
    values, decays = Scaled.apply(hidden_states, dt), A.float() * dt
    ends = {"cu_seqlens": cu_seqlens, "chunk_indices": chunk_indices}
    output, states = LinearAttention.apply(
        parts, C, B, values, decays, initial_states, ends, return_final_states
    )
    if D is not None:
        output = output + D[:, None].to(output.dtype) * hidden_states
    return output, states


class Scaled(torch.autograd.Function):
    """The product of x [1, T, H, P] and float32 factors [1, T, H], rounded once to x's dtype. Only
    these two are kept for backward."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, factors: Tensor) -> Tensor:
        ctx.save_for_backward(hidden, factors)
        return (hidden * factors[..., None]).to(hidden.dtype)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        hidden, factors = ctx.saved_tensors
        for_hidden = (gradient * factors[..., None]).to(hidden.dtype)
        return for_hidden, (gradient.float() * hidden).sum(-1)


class LinearAttention(torch.autograd.Function):
    """Linear attention of values [1, T, H, P] with queries and keys [1, T, G, N] of groups of heads
    and decays [1, T, H]. The library wants them for each head, up to 64 times as large, so only
    those of groups are kept for backward, which also computes the states again."""

    @staticmethod
    def forward(
        ctx: Any, parts: Parts, queries: Tensor, keys: Tensor, values: Tensor, decays: Tensor,
        initial: Tensor | None, ends: dict[str, Tensor | None], final: bool,
    ) -> tuple[Tensor, Tensor | None]:  # fmt: skip
        values = values.contiguous()
        sums = parts.sums(decays.contiguous(), chunk_size=CHUNK, scale=LOG2_E, **ends)
        q, k = (of_heads(one, values.shape[2]) for one in (queries, keys))
        before, after = states(parts, k, values, sums, initial, ends, final=final)
        output = parts.output(
            q=q, k=k, v=values, h=before, g=sums, scale=1.0, chunk_size=CHUNK, state_v_first=True,
            **ends,
        )  # fmt: skip
        ctx.set_materialize_grads(False)  # Of the states, where no answer follows.
        ctx.save_for_backward(queries, keys, values, sums, initial)
        ctx.parts, ctx.ends = parts, ends
        return output, after

    @staticmethod
    def backward(
        ctx: Any, gradient: Tensor | None, for_final: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        queries, keys, values, sums, initial = ctx.saved_tensors
        parts, ends = ctx.parts, ctx.ends
        q, k = (of_heads(one, values.shape[2]) for one in (queries, keys))
        gradient = torch.zeros_like(values) if gradient is None else gradient.contiguous()
        for_final = None if for_final is None else for_final.contiguous()
        common = {**ends, "do": gradient, "g": sums, "scale": 1.0}
        common |= {"chunk_size": CHUNK, "state_v_first": True}
        before, _ = states(parts, k, values, sums, initial, ends)
        for_before, for_initial = parts.for_states(
            q=q, k=k, v=values, h0=initial, dht=for_final, states_in_fp32=False, **common
        )
        common["dh"] = for_before
        for_q, for_k, _, for_sums = parts.for_inputs(q=q, k=k, v=values, h=before, **common)
        for_values = parts.for_values(q=q, k=k, **common)
        for_decays = parts.sums(for_sums, chunk_size=CHUNK, reverse=True, **ends)
        groups = queries.shape[2]
        for_queries, for_keys = (one.unflatten(2, (groups, -1)).sum(3) for one in (for_q, for_k))
        return None, for_queries, for_keys, for_values, for_decays, for_initial, None, None


def of_heads(groups: Tensor, heads: int) -> Tensor:
    """Return for each head what its group has: [1, T, G, N] -> [1, T, H, N]."""
    each = groups[:, :, :, None].expand(-1, -1, -1, heads // groups.shape[2], -1)
    return each.flatten(2, 3).contiguous()


def states(
    parts: Parts,
    keys: Tensor,
    values: Tensor,
    sums: Tensor,
    initial: Tensor | None,
    ends: dict[str, Tensor | None],
    *,
    final: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Return the states before all chunks and the final ones, those only if `final`."""
    return parts.states(
        k=keys, v=values, g=sums, h0=initial, output_final_state=final, chunk_size=CHUNK,
        states_in_fp32=False, state_v_first=True, **ends,
    )  # fmt: skip
