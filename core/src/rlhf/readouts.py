"""What is read off hidden states inside an engine's forward: log-probabilities and states.

A readout is `readout(hidden [T, H], head, batch) -> {name: tensor}`; options are bound with
`functools.partial`.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from rlhf.data.batch import PackedBatch
from rlhf.model import logits as chunks
from rlhf.model.head import Head


def token_logprobs(
    hidden: Tensor,
    head: Head,
    batch: PackedBatch,
    *,
    chunk: int | None = None,
    temperature: float = 1.0,
) -> dict[str, Tensor]:
    """Of each of the batch's N predictions, in float32 [N]: `logprobs` (differentiable in hidden
    states, weight and bias) and, without gradient, `entropy` (nats) and `correct` (1 where the
    likeliest token is the right one). Logits exist for `chunk` predictions at a time (default: a
    few thousand, by vocabulary and device) and are computed again in backward."""
    logprobs, entropy, correct = ChunkedLogprobs.apply(
        hidden.index_select(0, batch.predict_from),
        head.weight,
        head.bias,
        batch.predict,
        head.scale / temperature,
        None if head.softcap is None else head.softcap / temperature,
        chunk or chunks.rows_at_once(head.weight),
    )
    return {"logprobs": logprobs, "entropy": entropy, "correct": correct}


def summed_logprobs(hidden: Tensor, head: Head, batch: PackedBatch) -> dict[str, Tensor]:
    """`sum`, the scalar sum of the batch's log-probabilities, differentiable in hidden states,
    weight and bias; and `token_logprobs`' own without gradient.

    The gradient is computed with the value, chunk by chunk, and only scaled in backward: each
    chunk's logits are needed once.
    """
    total, *rest = SummedLogprobs.apply(
        hidden.index_select(0, batch.predict_from),
        head.weight,
        head.bias,
        batch.predict,
        head,
        torch.is_grad_enabled(),
    )
    return {"sum": total, **dict(zip(("logprobs", "entropy", "correct"), rest, strict=True))}


def answer_logprobs(
    hidden: Tensor, head: Head, batch: PackedBatch, **options: Any
) -> dict[str, Tensor]:
    """`logprobs` [A]: of each answer the sum over its predictions; and `token_logprobs`' own as
    `tokens/...`."""
    tokens = token_logprobs(hidden, head, batch, **options)
    zeros = tokens["logprobs"].new_zeros(len(batch.answer_example))
    sums = zeros.index_add(0, batch.answer, tokens["logprobs"])
    return {"logprobs": sums, **{f"tokens/{name}": value for name, value in tokens.items()}}


def scores(hidden: Tensor, head: Head, batch: PackedBatch) -> dict[str, Tensor]:
    """`scores` [A], in float32: a head of one label at each answer's last token, the place that
    transformers' sequence classifiers read. The product is in float32 too: in 16 bits rewards
    beyond 1 would be rounded to steps of 0.008."""
    ends = hidden.index_select(0, batch.answer_end).float()
    return {"scores": head.in_float32().logits(ends).squeeze(-1)}


def token_scores(
    hidden: Tensor, head: Head, batch: PackedBatch, *, tokens: Tensor | None = None
) -> dict[str, Tensor]:
    """`scores` [T, L], in float32: a head of L labels at every token, or of a language-model head
    the logits of the `tokens` [L] alone. All T rows cost less than waiting for the host to learn
    which ones are needed."""
    if tokens is not None:
        head = head.rows(tokens)
    return {"scores": head.logits(hidden)}


def hidden_at(places: Tensor) -> Callable[[Tensor, Head, PackedBatch], dict[str, Tensor]]:
    """A readout that gives `hidden` [P, H] at the row indices `places` [P]."""

    def readout(hidden: Tensor, head: Head, batch: PackedBatch) -> dict[str, Tensor]:
        return {"hidden": hidden.index_select(0, places)}

    return readout


class ChunkedLogprobs(torch.autograd.Function):
    """log softmax(cap(scale * (h @ W.T + b)))[target] by chunks of rows, softmax in float32.

    Forward keeps the log of the normaliser alone; backward computes each chunk's logits again, as
    in "Cut Your Losses in Large-Vocabulary Language Models" (arXiv 2411.09009), with the head's
    product left to the library.
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
        found = hidden.new_empty(4, len(hidden), dtype=torch.float32)
        for start in range(0, len(hidden), chunk):
            rows = slice(start, start + chunk)
            raw = torch.nn.functional.linear(hidden[rows], weight, bias)
            read = chunks.read(raw, targets[rows], scale=scale, softcap=softcap)
            for whole, part in zip(found, read, strict=True):
                whole[rows] = part
        normaliser, logprobs, entropy, correct = found
        ctx.save_for_backward(hidden, weight, bias, targets, normaliser)
        ctx.scale, ctx.softcap, ctx.chunk = scale, softcap, chunk
        ctx.mark_non_differentiable(entropy, correct)
        return logprobs, entropy, correct

    @staticmethod
    def backward(ctx: Any, gradient: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, targets, normaliser = ctx.saved_tensors
        needs_hidden, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        hidden_gradient = torch.zeros_like(hidden) if needs_hidden else None
        sums = Sums(weight, chunks=-(-len(hidden) // ctx.chunk)) if needs_weight else None
        bias_gradient = torch.zeros_like(bias, dtype=torch.float32) if needs_bias else None
        for start in range(0, len(hidden), ctx.chunk):
            rows = slice(start, start + ctx.chunk)
            raw = torch.nn.functional.linear(hidden[rows], weight, bias)
            change = chunks.pull(
                raw, targets[rows], normaliser[rows], gradient[rows],
                scale=ctx.scale, softcap=ctx.softcap,
            )  # fmt: skip
            if bias_gradient is not None:
                bias_gradient += change.sum(0, dtype=torch.float32)
            if hidden_gradient is not None:
                hidden_gradient[rows] = change @ weight
            if sums is not None:
                sums.add(change.T @ hidden[rows])
        weight_gradient = sums.total() if sums is not None else None
        bias_gradient = None if bias_gradient is None else bias_gradient.to(bias.dtype)
        return hidden_gradient, weight_gradient, bias_gradient, None, None, None, None


class SummedLogprobs(torch.autograd.Function):
    """The sum of `ChunkedLogprobs`, and its gradient in the same pass."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        head: Head,
        wanted: bool,
    ) -> tuple[Tensor, ...]:
        found = hidden.new_empty(4, len(hidden), dtype=torch.float32)
        needed = [wanted and needs for needs in ctx.needs_input_grad[:3]]
        chunk = chunks.rows_at_once(weight)
        gradients = Gradients(hidden, weight, bias, needed, chunk)
        bent: dict[str, Any] = {"scale": head.scale, "softcap": head.softcap}
        for start in range(0, len(hidden), chunk):
            rows = slice(start, start + chunk)
            raw = torch.nn.functional.linear(hidden[rows], weight, bias)
            if any(needed):
                # Reading and pulling may both overwrite what they are given.
                given = raw.clone() if chunks.overwrites(raw) else raw
                read = chunks.read(given, targets[rows], **bent)
                ones = torch.ones_like(read.normaliser)
                gradients.add(rows, chunks.pull(raw, targets[rows], read.normaliser, ones, **bent))
            else:
                read = chunks.read(raw, targets[rows], **bent)
            for whole, part in zip(found, read, strict=True):
                whole[rows] = part
        ctx.save_for_backward(*gradients.total())
        _, *parts = found
        ctx.mark_non_differentiable(*parts)
        return parts[0].sum(), *parts

    @staticmethod
    def backward(ctx: Any, gradient: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
        scaled = [None if item is None else item * gradient for item in ctx.saved_tensors]
        return *scaled, None, None, None


class Gradients:
    """The gradients for hidden states, weight and bias, as far as they are needed."""

    def __init__(
        self,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        needed: list[bool],
        chunk: int,
    ) -> None:
        self._hidden, self._weight, self._bias = hidden, weight, bias
        needs_hidden, needs_weight, needs_bias = needed
        self._for_hidden = torch.zeros_like(hidden) if needs_hidden else None
        self._for_weight = Sums(weight, chunks=-(-len(hidden) // chunk)) if needs_weight else None
        self._for_bias = None
        if needs_bias and bias is not None:
            self._for_bias = torch.zeros_like(bias, dtype=torch.float32)

    def add(self, rows: slice, change: Tensor) -> None:
        """Add a chunk's derivative by what the head's product gives [n, V]."""
        if self._for_bias is not None:
            self._for_bias += change.sum(0, dtype=torch.float32)
        if self._for_hidden is not None:
            self._for_hidden[rows] = change @ self._weight
        if self._for_weight is not None:
            self._for_weight.add(change.T @ self._hidden[rows])

    def total(self) -> tuple[Tensor | None, ...]:
        """The three gradients, None where none is needed."""
        weight = None if self._for_weight is None else self._for_weight.total()
        bias = None
        if self._for_bias is not None and self._bias is not None:
            bias = self._for_bias.to(self._bias.dtype)
        return self._for_hidden, weight, bias


class Sums:
    """The weight's gradient over the chunks: in float32, unless a single chunk needs no
    addition."""

    def __init__(self, weight: Tensor, *, chunks: int) -> None:
        self._weight = weight
        self._dtype = weight.dtype if chunks == 1 else torch.float32
        self._total: Tensor | None = None

    def add(self, part: Tensor) -> None:
        """Add one chunk's [V, H]."""
        if self._total is None:
            self._total = part.to(self._dtype)
        else:
            self._total += part

    def total(self) -> Tensor:
        """The sum in the weight's dtype; zeros when nothing was predicted."""
        if self._total is None:
            return torch.zeros_like(self._weight)
        return self._total.to(self._weight.dtype)


def capped_logits(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, scale: float, softcap: float | None
) -> tuple[Tensor, Tensor | None]:
    """Logits [n, V] in float32, and the soft cap's slope at each of them."""
    raw = torch.nn.functional.linear(hidden, weight, bias)
    values = chunks.capped(chunks.scaled(raw, scale), softcap)
    return values, None if softcap is None else 1 - (values / softcap).square_()
