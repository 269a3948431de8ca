"""What is read off hidden states inside an engine's forward: log-probabilities and states.

A readout is `readout(hidden [T, H], head, batch) -> {name: tensor}`; options are bound with
`functools.partial`.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from rlhf.data.batch import PackedBatch
from rlhf.model.head import Head
from rlhf.readouts import logits as chunks


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
    states, targets = predictions(hidden, batch)
    found = ChunkedLogprobs.apply(
        states,
        head.weight,
        head.bias,
        targets,
        head.scale / temperature,
        None if head.softcap is None else head.softcap / temperature,
        chunk or chunks.rows_at_once(head.weight),
    )
    names = ("logprobs", "entropy", "correct")
    return {name: value[: len(batch.predict)] for name, value in zip(names, found, strict=True)}


def predictions(hidden: Tensor, batch: PackedBatch) -> tuple[Tensor, Tensor]:
    """Hidden states [M, H] and targets [M] of the batch's N predictions; what is behind them, where
    products are computed for M > N rows, nobody reads."""
    rows = chunks.round_up(len(batch.predict), hidden.device)
    places, targets = (chunks.pad_rows(item, rows) for item in (batch.predict_from, batch.predict))
    return hidden.index_select(0, places), targets


def summed_logprobs(hidden: Tensor, head: Head, batch: PackedBatch) -> dict[str, Tensor]:
    """`sum`, the scalar sum of the batch's log-probabilities, differentiable in hidden states,
    weight and bias; and `token_logprobs`' own without gradient.

    The gradient is computed with the value, chunk by chunk, and only scaled in backward: each
    chunk's logits are needed once.
    """
    states, targets = predictions(hidden, batch)
    total, *rest = SummedLogprobs.apply(
        states,
        head.weight,
        head.bias,
        targets,
        head,
        len(batch.predict),
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

        def read(rows: slice, logits: Tensor) -> None:
            parts = chunks.read(logits, targets[rows], scale=scale, softcap=softcap)
            found[:, rows] = torch.stack(parts)

        chunks.each_chunk(read, hidden, weight, bias, chunk)
        normaliser, logprobs, entropy, correct = found
        ctx.save_for_backward(hidden, weight, bias, targets, normaliser)
        ctx.scale, ctx.softcap, ctx.chunk = scale, softcap, chunk
        ctx.mark_non_differentiable(entropy, correct)
        return logprobs, entropy, correct

    @staticmethod
    def backward(ctx: Any, gradient: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, targets, normaliser = ctx.saved_tensors
        needed = list(ctx.needs_input_grad[:3])
        gradients = Gradients(hidden, weight, bias, needed, ctx.chunk)

        def pull(rows: slice, logits: Tensor) -> None:
            change = chunks.pull(
                logits, targets[rows], normaliser[rows], gradient[rows],
                scale=ctx.scale, softcap=ctx.softcap,
            )  # fmt: skip
            gradients.add(rows, change)

        chunks.each_chunk(pull, hidden, weight, bias, ctx.chunk)
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
        wanted: bool,
    ) -> tuple[Tensor, ...]:
        found = hidden.new_empty(4, len(hidden), dtype=torch.float32)
        needed = [wanted and needs for needs in ctx.needs_input_grad[:3]]
        chunk = chunks.rows_at_once(weight)
        gradients = Gradients(hidden, weight, bias, needed, chunk, unscaled=True)
        bent: dict[str, Any] = {"scale": head.scale, "softcap": head.softcap}
        counted = chunks.pad_rows(found.new_ones(count), len(hidden))

        def read(rows: slice, logits: Tensor) -> None:
            again = any(needed) and chunks.overwrites(logits)
            parts = chunks.read(logits.clone() if again else logits, targets[rows], **bent)
            found[:, rows] = torch.stack(parts)
            if any(needed):
                change = chunks.pull(logits, targets[rows], parts.normaliser, counted[rows], **bent)
                gradients.add(rows, change)

        chunks.each_chunk(read, hidden, weight, bias, chunk)
        ctx.save_for_backward(*gradients.total())
        ctx.dtype = hidden.dtype
        _, *parts = found[:, :count]
        ctx.mark_non_differentiable(*parts)
        return parts[0].sum(), *parts

    @staticmethod
    def backward(ctx: Any, gradient: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
        return *scaled_by(gradient, ctx.saved_tensors, ctx.dtype), None, None, None, None


class Gradients:
    """The gradients for hidden states, weight and bias, as far as they are needed.

    `unscaled` ones will be multiplied in backward: fp16 has no room for sums before that, so they
    stay in float32.
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

    def add(self, rows: slice, change: Tensor) -> None:
        """Add a chunk's derivative by what the head's product gives [n, V]."""
        if self._for_bias is not None:
            self._for_bias += change.sum(0, dtype=torch.float32)
        hidden, weight = self._hidden[rows], self._weight
        if self._wide:
            change, hidden, weight = change.float(), hidden.float(), weight.float()
        if self._for_hidden is not None:
            self._for_hidden[rows] = change @ weight
        if not self._needs_weight:
            return
        part = change.T @ hidden
        # Over several chunks in float32; a single one needs no addition.
        if self._for_weight is None:
            self._for_weight = part if self._single else part.float()
        else:
            self._for_weight += part

    def total(self) -> tuple[Tensor | None, ...]:
        """The three gradients, None where none is needed; in the weight's dtype, or in float32
        where they are unscaled ones of fp16."""
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
    """Gradients that were computed with their value, in backward: each times `gradient`."""
    return [None if item is None else (item * gradient).to(dtype) for item in saved]
