"""Log-probabilities by chunks of logits, with their own backward: no tensor of predictions times
vocabulary exists."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from rlhf.model.head import Head
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
            parts = chunks.read(logits, targets[rows], scale=scale, softcap=softcap)
            values[:, rows] = torch.stack(parts)

        chunks.each_chunk(read, hidden, weight, bias, chunk)
        normaliser, logprobs, entropy, correct = values
        ctx.save_for_backward(hidden, weight, bias, targets, normaliser)
        ctx.scale, ctx.softcap, ctx.chunk = scale, softcap, chunk
        ctx.mark_non_differentiable(entropy, correct)
        return logprobs, entropy, correct

    @staticmethod
    def backward(ctx: Any, gradient: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, targets, normaliser = ctx.saved_tensors
        needed = list(ctx.needs_input_grad[:3])
        gradients = Gradients(hidden, weight, bias, needed, ctx.chunk)

        def differentiate(rows: slice, logits: Tensor) -> None:
            for_logits = chunks.logit_gradient(
                logits, targets[rows], normaliser[rows], gradient[rows],
                scale=ctx.scale, softcap=ctx.softcap,
            )  # fmt: skip
            gradients.add(rows, for_logits)

        chunks.each_chunk(differentiate, hidden, weight, bias, ctx.chunk)
        return *gradients.total(), None, None, None, None


class SummedLogprobs(torch.autograd.Function):
    """The sum of the first `count` of `ChunkedLogprobs`, and its gradient in the same pass."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        head: Head,
        count: int,
        with_gradient: bool,
    ) -> tuple[Tensor, ...]:
        values = hidden.new_empty(4, len(hidden), dtype=torch.float32)
        needed = [with_gradient and needs for needs in ctx.needs_input_grad[:3]]
        chunk = chunks.rows_at_once(weight)
        gradients = Gradients(hidden, weight, bias, needed, chunk, unscaled=True)
        transform: dict[str, Any] = {"scale": head.scale, "softcap": head.softcap}
        # Rows that only fill a block have no gradient.
        counted = chunks.pad_rows(values.new_ones(count), len(hidden))

        def read(rows: slice, logits: Tensor) -> None:
            target = targets[rows]
            needs_copy = any(needed) and chunks.overwrites(logits)
            parts = chunks.read(logits.clone() if needs_copy else logits, target, **transform)
            values[:, rows] = torch.stack(parts)
            if any(needed):
                gradient = counted[rows]
                for_logits = chunks.logit_gradient(
                    logits, target, parts.normaliser, gradient, **transform
                )
                gradients.add(rows, for_logits)

        chunks.each_chunk(read, hidden, weight, bias, chunk)
        ctx.save_for_backward(*gradients.total())
        ctx.dtype = hidden.dtype
        _, *parts = values[:, :count]
        ctx.mark_non_differentiable(*parts)
        return parts[0].sum(), *parts

    @staticmethod
    def backward(ctx: Any, gradient: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
        return *scaled_by(gradient, ctx.saved_tensors, ctx.dtype), None, None, None, None


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
        needed: list[bool],
        chunk: int,
        *,
        unscaled: bool = False,
    ) -> None:
        self._wide = unscaled and hidden.dtype == torch.float16
        self._hidden, self._weight = hidden, weight
        self._single = len(hidden) <= chunk
        needs_hidden, needs_weight, needs_bias = needed
        dtype = torch.float32 if self._wide else hidden.dtype
        self._for_hidden = torch.zeros_like(hidden, dtype=dtype) if needs_hidden else None
        self._for_weight: Tensor | None = None
        self._needs_weight = needs_weight
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
        part = for_logits.T @ hidden
        # Chunks are summed in float32. A single chunk needs no sum.
        if self._for_weight is None:
            self._for_weight = part if self._single else part.float()
        else:
            self._for_weight += part

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


def scaled_by(
    gradient: Tensor, saved: Sequence[Tensor | None], dtype: torch.dtype
) -> list[Tensor | None]:
    """Return gradients that were computed in forward, each multiplied by backward's `gradient`."""
    return [None if item is None else (item * gradient).to(dtype) for item in saved]
