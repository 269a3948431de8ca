"""Attention over rows of few long examples, one product per example by cuDNN.

On an H200 it takes 0.7 to 0.8 of flex attention's time for examples of 8,192 tokens and more, and
more than it for short ones (benchmarks/RESULTS.md).
"""

from collections.abc import Callable, Sequence
from functools import cache, partial
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from rlhf.data.packing import blank_batch
from rlhf.model.flex import Scoring, flex_tree
from rlhf.model.masks import Tree, TreeMask

SIZES = 1024
"""cuDNN builds a kernel for each length, in 0.15 s: lengths are rounded up to multiples of this."""

PROBED = 1280
"""Tokens of the example on which cuDNN is compared with flex attention."""

AGREEMENT = 2e-2
"""Largest accepted error, as a share of the norm: rounding to bf16 gives 4e-3."""


class Kernel(NamedTuple):
    """Causal attention of one example and its gradient, as operators of torch."""

    forward: Any
    """(query, key, value, scale) -> (output, log-sum-exp of the scores, what else `backward`
    needs)."""
    backward: Any
    """(gradient, query, key, value, output, log-sum-exp, rest, scale) -> three gradients."""


def _cudnn_forward(
    query: Tensor, key: Tensor, value: Tensor, scale: float | None
) -> tuple[Tensor, Tensor, tuple[Any, ...]]:
    attend = torch.ops.aten._scaled_dot_product_cudnn_attention
    output, lse, *rest, _ = attend(query, key, value, None, True, 0.0, True, False, scale=scale)
    return output, lse, tuple(rest)


def _cudnn_backward(
    gradient: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    output: Tensor,
    lse: Tensor,
    rest: tuple[Any, ...],
    scale: float | None,
) -> tuple[Tensor, Tensor, Tensor]:
    *sizes, seed, offset = rest
    differentiate = torch.ops.aten._scaled_dot_product_cudnn_attention_backward
    gradients: tuple[Tensor, Tensor, Tensor] = differentiate(
        gradient, query, key, value, output, lse, seed, offset, None, *sizes, 0.0, True, scale=scale
    )
    return gradients


CUDNN = Kernel(_cudnn_forward, _cudnn_backward)


def long_examples(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    lengths: Sequence[int],
    scale: float | None,
    kernel: Kernel = CUDNN,
) -> Tensor:
    """Compute attention over a row of plainly causal examples of `lengths`: query [1, heads, T, D],
    key and value [1, KV heads, T, D] -> [1, heads, T, D]. Tokens behind the last example, which
    only round the row up, get zeros: nothing reads them."""
    output: Tensor = _LongExamples.apply(query, key, value, tuple(lengths), scale, kernel)
    return output


class _LongExamples(torch.autograd.Function):
    """Keeps only the row's own tensors for backward, whatever the examples are padded to.

    An example's padding is what follows it in the row, which its tokens do not see, since it is
    later. Outputs there are dropped, and their gradient is 0.
    """

    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        lengths: tuple[int, ...],
        scale: float | None,
        kernel: Kernel,
    ) -> Tensor:
        ends = list(accumulate(lengths, initial=0))
        parts = [slice(start, end) for start, end in pairwise(ends)]
        output = query.new_zeros(*query.transpose(1, 2).shape).transpose(1, 2)
        kept = []
        for part in parts:
            windows = (_window(tensor, part) for tensor in (query, key, value))
            found, *more = kernel.forward(*windows, scale)
            output[:, :, part] = found[:, :, : part.stop - part.start]
            kept.append(more)
        ctx.save_for_backward(query, key, value, output)
        ctx.kept, ctx.parts, ctx.scale, ctx.kernel = kept, parts, scale, kernel
        return output

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        *inputs, output = ctx.saved_tensors
        changes = [torch.zeros_like(tensor) for tensor in inputs]
        for part, more in zip(ctx.parts, ctx.kept, strict=True):
            windows = [_window(tensor, part) for tensor in (*inputs, output)]
            own = _window(gradient[:, :, : part.stop], part)
            found = ctx.kernel.backward(own, *windows, *more, ctx.scale)
            for change, values in zip(changes, found, strict=True):
                change[:, :, part] = values[:, :, : part.stop - part.start]
        return *changes, None, None, None


def _window(tensor: Tensor, part: slice) -> Tensor:
    """Return an example and what follows it, up to the size of a kernel, with zeros behind the end
    of `tensor` [1, heads, T, D]; in memory the heads of a token are adjacent."""
    size = -(-(part.stop - part.start) // SIZES) * SIZES
    window = tensor.transpose(1, 2)[:, part.start : part.start + size]
    missing = size - window.shape[1]
    return (pad(window, (0, 0, 0, 0, 0, missing)) if missing else window).transpose(1, 2)


@cache
def cudnn_agrees(heads: tuple[int, int], dim: int, dtype: torch.dtype, scale: float | None) -> bool:
    """Return whether cuDNN's attention with so many query and KV heads runs here and gives the
    values and gradients of flex attention, on one random example."""
    generator = torch.Generator("cuda").manual_seed(0)
    query_heads, key_heads = heads
    shapes = [(1, PROBED, n, dim) for n in (query_heads, key_heads, key_heads, query_heads)]
    query, key, value, weights = (
        torch.randn(shape, generator=generator, device="cuda", dtype=dtype).transpose(1, 2)
        for shape in shapes
    )
    batch = blank_batch(torch.zeros(PROBED, dtype=torch.long, device="cuda"), ((0, (PROBED,)),))
    mask = TreeMask(Tree(batch), None)
    ways = (
        partial(long_examples, lengths=mask.tree.lengths[:-1], scale=scale),
        partial(flex_tree, mask=mask, scoring=Scoring(0.0, scale, None, None)),
    )
    try:
        ours, theirs = (values_and_gradients(way, query, key, value, weights) for way in ways)
    except (RuntimeError, AttributeError, TypeError):  # No such kernel for this device or version.
        return False
    errors = [(a - b).norm() / b.norm() for a, b in zip(ours, theirs, strict=True)]
    return bool(torch.stack(errors).max() < AGREEMENT)


def values_and_gradients(attend: Callable[..., Tensor], *inputs: Tensor) -> tuple[Tensor, ...]:
    """Return the output of `attend` on query, key and value, and their gradients for the weights of
    the last input."""
    *values, weights = inputs
    with torch.enable_grad():
        leaves = [item.detach().requires_grad_() for item in values]
        output = attend(*leaves)
        return output.detach(), *torch.autograd.grad(output, leaves, weights)
