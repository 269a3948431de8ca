"""Log-probabilities by chunks of logits, with their own backward: no tensor of predictions times
vocabulary exists."""

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

from rlhf.data.batch import PackedBatch
from rlhf.devices import fused_on
from rlhf.model.head import Head
from rlhf.model.sequence import all_rows, part_of_rank
from rlhf.readouts import logits as chunks


class ChunkedLogprobs(torch.autograd.Function):
    """log softmax(cap(scale * (h @ W.T + b)))[target] by chunks of rows, softmax in float32.

    Forward keeps only the log of the normaliser, and backward computes each chunk's logits again,
    as in "Cut Your Losses in Large-Vocabulary Language Models" (arXiv 2411.09009), but with the
    library's matrix product.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        scale: float,
        softcap: float | None,
        chunk: int,
    ) -> tuple[Tensor, Tensor, Tensor]:
        values = hidden.new_empty(4, len(hidden), dtype=torch.float32)

        def read(rows: slice, logits: Tensor) -> None:
            values[:, rows] = chunks.read(logits, targets[rows], scale=scale, softcap=softcap)

        chunks.each_chunk(read, hidden, weight, bias, chunk)
        normaliser, logprobs, entropy, correct = values
        ctx.save_for_backward(hidden, weight, bias, targets, normaliser)
        ctx.scale, ctx.softcap, ctx.chunk = scale, softcap, chunk
        ctx.mark_non_differentiable(entropy, correct)
        return logprobs, entropy, correct

    @staticmethod
    def backward(ctx: Any, gradient: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, targets, normaliser = ctx.saved_tensors
        gradients = Gradients(hidden, weight, bias, ctx.needs_input_grad[:3], ctx.chunk)

        def differentiate(rows: slice, logits: Tensor) -> None:
            for_logits = chunks.logit_gradient(
                logits, targets[rows], normaliser[rows], gradient[rows],
                scale=ctx.scale, softcap=ctx.softcap,
            )  # fmt: skip
            gradients.add(rows, for_logits)

        chunks.each_chunk(differentiate, hidden, weight, bias, ctx.chunk)
        return *gradients.total(), None, None, None, None


def chunked_sum(
    read: Callable[[slice, Tensor, Tensor, bool], tuple[Tensor, Tensor]],
    total: Callable[[Tensor], Tensor],
    hidden: Tensor,
    head: Head,
    batch: PackedBatch,
    *,
    names: Sequence[str],
    chunk: int | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return a scalar over the batch's N predictions, differentiable in hidden states, weight and
    bias, and the values of `names` [N] without gradient.

    `read(rows, logits, targets, with_gradient)` returns for n predictions, whose raw logits [n, V]
    it may overwrite, the values [len(names), n] in float32, and, if `with_gradient`, the derivative
    of the scalar by the logits [n, V] in their dtype. `total(values)` returns the scalar. The
    gradient is computed together with the value, `chunk` predictions at a time (default: a few
    thousand, by vocabulary and device), and only scaled in backward. Sequence ranks divide the
    predictions; `rows` are numbers among all of them.
    """
    axis, own = head.sequence, part_of_rank(len(batch.predict), head.sequence)
    states, targets = predictions(hidden, batch, own)
    inputs = (states, head.weight, head.bias)
    grad = torch.is_grad_enabled()
    needed = [grad and item is not None and item.requires_grad for item in inputs]
    count, chunk = own.stop - own.start, chunk or chunks.rows_at_once(head.weight)
    values = states.new_empty(len(names), len(states), dtype=torch.float32)
    gradients = Gradients(*inputs, needed, chunk, unscaled=True)

    def act(rows: slice, logits: Tensor) -> None:
        places = slice(rows.start + own.start, rows.stop + own.start)
        values[:, rows], gradient = read(places, logits, targets[rows], any(needed))
        if any(needed):
            # Rows that only fill a block have no gradient.
            gradient[max(count - rows.start, 0) :] = 0
            gradients.add(rows, gradient)

    with torch.no_grad():
        chunks.each_chunk(act, *inputs, chunk)
        parts = values[:, :count]
        if axis.size > 1:
            parts = all_rows(parts.T, len(batch.predict), axis).T
        known = total(parts) / axis.size, gradients.total()
    # The ranks' shares add up to the value, and the gradient of each reaches all of them.
    share = KnownGradient.apply(known, *inputs)
    value = share if axis.size == 1 else all_rows(share[None], axis.size, axis).sum()
    return value, dict(zip(names, parts, strict=True))


def predictions(
    hidden: Tensor, batch: PackedBatch, own: slice = slice(None)
) -> tuple[Tensor, Tensor]:
    """Return hidden states [M, H] and targets [M] of the batch's N predictions, or of its `own`. On
    some devices products are computed for M > N rows; the rows behind N are not read."""
    places, targets = batch.predict_from[own], batch.predict[own]
    rows = chunks.round_up(len(places), hidden.device)
    places, targets = (chunks.pad_rows(item, rows) for item in (places, targets))
    return hidden.index_select(0, places), targets


class KnownGradient(torch.autograd.Function):
    """A scalar that was computed together with its gradients."""

    @staticmethod
    def forward(
        ctx: Any,
        known: tuple[Tensor, tuple[Tensor | None, ...]],
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
    ) -> Tensor:
        value, gradients = known
        ctx.save_for_backward(*gradients)
        ctx.dtype = hidden.dtype
        return value

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        saved = ctx.saved_tensors
        return None, *(None if item is None else (item * gradient).to(ctx.dtype) for item in saved)


def add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    """Add a matrix product to a `total` in float32. On CUDA the library adds it without rounding it
    to the factors' dtype and without a tensor for it."""
    if left.dtype == total.dtype:
        total.addmm_(left, right)
    elif not fused_on(total.device.type):
        total += left @ right
    elif total.is_meta:
        return  # torch 2.11 has no such product there.
    elif adds_products(total.device, left.dtype):
        torch.addmm(total, left, right, out_dtype=total.dtype, out=total)
    else:
        total += left @ right


@cache
def adds_products(device: torch.device, dtype: torch.dtype) -> bool:
    """Return whether a device adds products of `dtype` to float32. With bf16, CUDA devices below
    compute capability 8.0 do not."""
    square = torch.zeros(16, 16, dtype=dtype, device=device)
    try:
        torch.addmm(square.float(), square, square, out_dtype=torch.float32)
    except RuntimeError:
        return False
    return True


class Gradients:
    """Gradients for hidden states, weight and bias, as far as they are needed, summed over chunks.

    `unscaled` gradients are computed in forward and multiplied in backward. Before that, sums may
    exceed the range of fp16, so they stay in float32.
    """

    def __init__(
        self,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        needed: Sequence[bool],
        chunk: int,
        *,
        unscaled: bool = False,
    ) -> None:
        self._wide = unscaled and hidden.dtype == torch.float16
        self._hidden, self._weight = hidden, weight
        self._single = len(hidden) <= chunk
        needs_hidden, self._needs_weight, needs_bias = needed
        dtype = torch.float32 if self._wide else hidden.dtype
        self._for_hidden = torch.zeros_like(hidden, dtype=dtype) if needs_hidden else None
        self._for_weight: Tensor | None = None
        self._for_bias = None
        if needs_bias and bias is not None:
            self._for_bias = torch.zeros_like(bias, dtype=torch.float32)

    def add(self, rows: slice, for_logits: Tensor) -> None:
        """Add a chunk, given the gradient for its raw logits [n, V]."""
        if self._for_bias is not None:
            self._for_bias += for_logits.sum(0, dtype=torch.float32)
        hidden, weight = self._hidden[rows], self._weight
        if self._wide:
            for_logits, hidden = for_logits.float(), hidden.float()
            weight = weight.float()
        if self._for_hidden is not None:
            self._for_hidden[rows] = for_logits @ weight
        if not self._needs_weight:
            return
        if self._single:
            self._for_weight = for_logits.T @ hidden
            return
        if self._for_weight is None:
            self._for_weight = torch.zeros_like(weight, dtype=torch.float32)
        add_product(self._for_weight, for_logits.T, hidden)

    def total(self) -> tuple[Tensor | None, ...]:
        """Return the three gradients, None for those not needed; in the weight's dtype, or in
        float32 for unscaled ones of fp16."""
        weight, bias = self._for_weight, self._for_bias
        if self._needs_weight and weight is None:
            weight = torch.zeros_like(self._weight)
        if self._wide:
            return self._for_hidden, weight, bias
        dtype = self._weight.dtype
        narrow = [None if item is None else item.to(dtype) for item in (weight, bias)]
        return self._for_hidden, *narrow
