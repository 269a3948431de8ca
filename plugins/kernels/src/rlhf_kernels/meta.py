"""Stand-ins for kernels on the meta device, where a step is rehearsed without values.

Each keeps for backward what the real kernel keeps, and returns tensors of the same shapes and
dtypes, so that the rehearsal counts the right bytes.
"""

from typing import Any

import torch
from torch import Tensor

from rlhf_kernels.mamba import Parts


class MetaAttention(torch.autograd.Function):
    """Fused attention: keeps its inputs, its output and a float per row. With `sums`, gradients are
    summed in float32 before they are rounded, as by FlashAttention."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, sums: bool) -> Tensor:
        output = query.new_empty((*query.shape[:-1], value.shape[-1]))
        normaliser = query.new_empty(query.shape[:-1], dtype=torch.float32)
        ctx.save_for_backward(query, key, value, output, normaliser)
        ctx.sums = sums
        return output

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, _, normaliser = ctx.saved_tensors
        inputs = (query, key, value)
        # The real backward holds one more float per row while it runs.
        held = [torch.empty_like(normaliser)]
        if ctx.sums:
            held += [torch.empty_like(tensor, dtype=torch.float32) for tensor in inputs]
        changes = [torch.empty_like(tensor) for tensor in inputs]
        del held
        return *changes, None


class MetaNorm(torch.autograd.Function):
    """A fused RMS norm: keeps its input and a float per row."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor) -> Tensor:
        scale = hidden.new_empty(hidden.shape[:-1], dtype=torch.float32)
        ctx.save_for_backward(hidden, weight, scale)
        return torch.empty_like(hidden)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        hidden, weight, _ = ctx.saved_tensors
        return torch.empty_like(hidden), torch.empty_like(weight)


class MetaGatedNorm(torch.autograd.Function):
    """A fused RMS norm with a gate: keeps both inputs and a float per row and group."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, gate: Tensor, weight: Tensor, groups: int) -> Tensor:
        scale = rows.new_empty(len(rows), groups, dtype=torch.float32)
        ctx.save_for_backward(rows, gate, weight, scale)
        return rows.new_empty(rows.shape)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        *inputs, _ = ctx.saved_tensors
        return *(torch.empty_like(tensor) for tensor in inputs), None


class MetaGate(torch.autograd.Function):
    """A fused gated activation: keeps both inputs and writes their gradients over them."""

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        ctx.save_for_backward(gate, up)
        return torch.empty_like(up)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        gate, up = ctx.saved_tensors
        return gate, up


class MetaProduct(torch.autograd.Function):
    """A product in FP8: keeps its weight, and of its input `kept`, if anything."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, kept: Tensor | None) -> Tensor:
        ctx.save_for_backward(weight, *([] if kept is None else [kept]))
        ctx.shape = hidden.shape
        return hidden.new_empty(*hidden.shape[:-1], len(weight))

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        weight = ctx.saved_tensors[0]
        to_weight = torch.empty_like(weight) if ctx.needs_input_grad[1] else None
        return gradient.new_empty(ctx.shape), to_weight, None


class MetaScan(torch.autograd.Function):
    """A scan by chunks: keeps its inputs, its output, and `kept` numbers for each token and head.
    Backward computes the states of all chunks again, tensors like `chunks`, beside their
    gradients."""

    @staticmethod
    def forward(
        ctx: Any, output: Tensor, state: Tensor, kept: int, chunks: Tensor, *inputs: Tensor
    ) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(output, output.new_empty(*output.shape[:3], kept), *inputs)
        ctx.chunks = chunks.shape, chunks.dtype
        return output, state

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        output, _, *inputs = ctx.saved_tensors
        shape, dtype = ctx.chunks
        held = [output.new_empty(shape, dtype=dtype) for _ in range(2)]
        changes = [torch.empty_like(tensor) for tensor in inputs]
        del held
        return None, None, None, None, *changes


class MetaConvolution(torch.autograd.Function):
    """A short convolution with its activation: keeps its input."""

    @staticmethod
    def forward(ctx: Any, states: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(states, weight)
        return torch.empty_like(states)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        states, weight = ctx.saved_tensors
        # The real backward holds the gradient before the activation too.
        held, change = torch.empty_like(states), torch.empty_like(states)
        del held
        return change, torch.empty_like(weight)


def _sums(decays: Tensor, **_: Any) -> Tensor:
    return decays.new_empty(decays.shape, dtype=torch.float32)


def _states(
    *,
    k: Tensor,
    v: Tensor,
    cu_seqlens: Tensor,
    chunk_indices: Tensor,
    output_final_state: bool = True,
    **_: Any,
) -> tuple[Tensor, Tensor | None]:
    state = (*v.shape[2:], k.shape[-1])
    before = k.new_empty(1, len(chunk_indices), *state)
    number = len(cu_seqlens) - 1
    final = k.new_empty(number, *state, dtype=torch.float32) if output_final_state else None
    return before, final


def _output(*, v: Tensor, **_: Any) -> Tensor:
    return torch.empty_like(v)


def _for_states(*, h0: Tensor | None, **arguments: Any) -> tuple[Tensor, Tensor | None]:
    before, _ = _states(**arguments, output_final_state=False)
    return before, None if h0 is None else torch.empty_like(h0, dtype=torch.float32)


def _for_inputs(
    *, q: Tensor, k: Tensor, g: Tensor, **_: Any
) -> tuple[Tensor, Tensor, None, Tensor]:
    return torch.empty_like(q), torch.empty_like(k), None, torch.empty_like(g)


def _for_values(*, do: Tensor, **_: Any) -> Tensor:
    return torch.empty_like(do)


META_PARTS = Parts(_sums, _states, _output, _for_states, _for_inputs, _for_values)
"""Those of gated linear attention."""
