"""The scan of Mamba 2 (Dao and Gu, arXiv 2405.21060) as gated linear attention with one decay for
each head (Yang et al., arXiv 2312.06635), which flash-linear-attention computes.

With the states of a head S_t = exp(A d_t) S_(t-1) + d_t x_t B_t' and y_t = S_t C_t + D x_t: C are
queries, B keys, d x values, and A d the logarithms of decays.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import softplus


def by_linear_attention(
    run: Callable[..., tuple[Tensor, Tensor]],
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
    **_: Any,
) -> tuple[Tensor, Tensor | None]:
    """Return the output [1, T, H, P] and the final states [S, H, P, N] or None of transformers'
    `mamba2_chunk_scan` for `hidden_states` [1, T, H, P], dt [1, T, H], A [H], B and C
    [1, T, G, N], by `run`, which is flash-linear-attention's `chunk_simple_gla`."""
    if dt_bias is not None:
        dt = dt + dt_bias.to(dt.dtype)
    if dt_softplus:
        dt = softplus(dt)
    dt = dt.clamp(*dt_limit).float()
    values, decays = Scaled.apply(hidden_states, dt), A.float() * dt
    run = partial(run, output_final_state=return_final_states)
    output, states = OfGroups.apply(run, C, B, values, decays, initial_states, cu_seqlens)
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


class OfGroups(torch.autograd.Function):
    """Linear attention with queries and keys [1, T, G, N] of groups of heads. The library wants
    them for each head, up to 64 times as large, so backward computes it again."""

    @staticmethod
    def forward(ctx: Any, run: Any, *given: Any) -> tuple[Tensor, Tensor]:
        ctx.run = run
        ctx.set_materialize_grads(False)  # Of the states, where no answer follows.
        ctx.save_for_backward(*given)
        return attend(run, *given)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        *given, cu_seqlens = ctx.saved_tensors
        leaves: Any = [None if one is None else one.detach().requires_grad_() for one in given]
        with torch.enable_grad():
            results = attend(ctx.run, *(*leaves, cu_seqlens))
        used = [pair for pair in zip(results, gradients, strict=True) if pair[1] is not None]
        outputs, weights = zip(*used, strict=True)
        present = [one for one in leaves if one is not None]
        found = iter(torch.autograd.grad(outputs, present, weights))
        return None, *(None if one is None else next(found) for one in leaves), None


def attend(
    run: Callable[..., tuple[Tensor, Tensor]],
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    decays: Tensor,
    initial_states: Tensor | None,
    cu_seqlens: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Return the output [1, T, H, P] and the final states for `values` [1, T, H, P]."""
    heads = values.shape[2]
    queries, keys = (
        one[:, :, :, None].expand(-1, -1, -1, heads // one.shape[2], -1).flatten(2, 3)
        for one in (queries, keys)
    )
    return run(
        queries, keys, values, g=decays, scale=1.0, initial_state=initial_states,
        state_v_first=True, cu_seqlens=cu_seqlens,
    )  # fmt: skip
