"""Attention over rows of few long examples, one product per example by cuDNN.

For examples of 8,000 tokens it takes 0.78 of our kernel's time, for those of 4,000 1.07
(benchmarks/NOTES.md).
"""

from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from rlhf_kernels.tree import empty_row

SIZES = 1024
"""cuDNN builds a kernel for each length, in 0.15 s: lengths are rounded up to multiples of this."""

NOTHING_SEEN = 1e9
"""A log-sum-exp with which a token sees a share of 0 of every other."""


class Kernel(NamedTuple):
    """Causal attention of one example and its gradient."""

    forward: Any
    """(query, key, value, scale) -> (output, log-sum-exp of the scores [1, heads, L])."""
    backward: Any
    """(gradient, query, key, value, output, log-sum-exp, scale) -> three gradients."""


def _cudnn_forward(
    query: Tensor, key: Tensor, value: Tensor, scale: float | None
) -> tuple[Tensor, Tensor]:
    attend = torch.ops.aten._scaled_dot_product_cudnn_attention
    output, lse, *_ = attend(query, key, value, None, True, 0.0, True, False, scale=scale)
    return output, lse.squeeze(-1)


def _cudnn_backward(
    gradient: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    output: Tensor,
    lse: Tensor,
    scale: float | None,
) -> tuple[Tensor, Tensor, Tensor]:
    differentiate = torch.ops.aten._scaled_dot_product_cudnn_attention_backward
    no_dropout = torch.zeros((), dtype=torch.long, device=query.device)
    sizes = (None, None, query.shape[2], key.shape[2])
    gradients: tuple[Tensor, Tensor, Tensor] = differentiate(
        gradient, query, key, value, output, lse.unsqueeze(-1), no_dropout, no_dropout, None,
        *sizes, 0.0, True, scale=scale,
    )  # fmt: skip
    return gradients


KERNELS = {"cuda": Kernel(_cudnn_forward, _cudnn_backward)}
"""The kernel of each kind of device."""


def long_examples(
    query: Tensor, key: Tensor, value: Tensor, lengths: Tensor, scale: float | None
) -> Tensor:
    """Compute attention over a row of plainly causal examples of `lengths` [n], on the host: query
    [1, heads, T, C], key [1, KV heads, T, C], value [1, KV heads, T, D] -> [1, heads, T, D]. Tokens
    behind the last example, which only round the row up, get zeros: nothing reads them."""
    output: Tensor = _attend(query, key, value, lengths, scale)[0]
    return output


# Operators, since a compiler would otherwise make a function for each number and size of examples.
@torch.library.custom_op("rlhf::long_examples", mutates_args=())
def _attend(
    query: Tensor, key: Tensor, value: Tensor, lengths: Tensor, scale: float | None
) -> tuple[Tensor, Tensor]:
    """Return the output, and the log-sum-exp of each token's scores [1, heads, T].

    An example's padding is what follows it in the row, which its tokens do not see, since it is
    later. Outputs there are dropped, and their gradient is 0.
    """
    output, lse = _empty(query, value)
    output.zero_()
    lse.fill_(NOTHING_SEEN)
    for part in _parts(lengths):
        windows = (_window(tensor, part) for tensor in (query, key, value))
        found, own = KERNELS[query.device.type].forward(*windows, scale)
        length = part.stop - part.start
        output[:, :, part], lse[:, :, part] = found[:, :, :length], own[:, :, :length]
    return output, lse


@_attend.register_fake
def _(query: Tensor, key: Tensor, value: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    return _empty(query, value)


@torch.library.custom_op("rlhf::long_examples_backward", mutates_args=())
def _differentiate(
    gradient: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    output: Tensor,
    lse: Tensor,
    lengths: Tensor,
    scale: float | None,
) -> tuple[Tensor, Tensor, Tensor]:
    changes = torch.zeros_like(query), torch.zeros_like(key), torch.zeros_like(value)
    for part in _parts(lengths):
        windows = [_window(tensor, part) for tensor in (query, key, value, output)]
        own = _window(gradient[:, :, : part.stop], part)
        length = part.stop - part.start
        # The scores of what follows are dropped, like its outputs.
        seen = pad(lse[:, :, part], (0, own.shape[2] - length), value=NOTHING_SEEN)
        found = KERNELS[query.device.type].backward(own, *windows, seen, scale)
        for change, values in zip(changes, found, strict=True):
            change[:, :, part] = values[:, :, :length]
    return changes


@_differentiate.register_fake
def _(gradient: Tensor, query: Tensor, key: Tensor, value: Tensor, *_: Any) -> Any:
    return torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)


def _keep(ctx: Any, inputs: Any, output: Any) -> None:
    *tensors, ctx.scale = inputs
    *row, lengths = tensors
    ctx.save_for_backward(*row, *output, lengths)


def _gradients(ctx: Any, gradient: Tensor, _: Any) -> tuple[Tensor | None, ...]:
    return *_differentiate(gradient, *ctx.saved_tensors, ctx.scale), None, None


_attend.register_autograd(_gradients, setup_context=_keep)


def _empty(query: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """Return an output, in which the heads of a token are adjacent, and a log-sum-exp."""
    lse = query.new_empty(query.shape[:3], dtype=torch.float32)
    return empty_row(query, value.shape[3]), lse


def _parts(lengths: Tensor) -> list[slice]:
    """Return where in the row each example is."""
    return [slice(*ends) for ends in pairwise(accumulate(lengths.tolist(), initial=0))]


def _window(tensor: Tensor, part: slice) -> Tensor:
    """Return an example and what follows it, up to the size of a kernel, with zeros behind the end
    of `tensor` [1, heads, T, D]; in memory the heads of a token are adjacent."""
    size = -(-(part.stop - part.start) // SIZES) * SIZES
    window = tensor.transpose(1, 2)[:, part.start : part.start + size]
    missing = size - window.shape[1]
    return (pad(window, (0, 0, 0, 0, 0, missing)) if missing else window).transpose(1, 2)
