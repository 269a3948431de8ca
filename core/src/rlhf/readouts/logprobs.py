"""Readouts: log-probabilities, scores and hidden states, read inside an engine's forward.

Options of a readout are bound with `functools.partial`.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from rlhf.data.batch import PackedBatch
from rlhf.model.head import Head
from rlhf.readouts import logits as chunks
from rlhf.readouts.chunked import ChunkedLogprobs, SummedLogprobs


def token_logprobs(
    hidden: Tensor,
    head: Head,
    batch: PackedBatch,
    *,
    chunk: int | None = None,
    temperature: float = 1.0,
) -> dict[str, Tensor]:
    """Read the log-probabilities of the batch's N predictions, in float32 [N].

    `logprobs` is differentiable in hidden states, weight and bias. Without gradient: `entropy`
    (nats) and `correct` (1 where the most likely token is the target). Logits exist for `chunk`
    predictions at a time (default: a few thousand, by vocabulary and device) and are computed again
    in backward.
    """
    states, targets = predictions(hidden, batch)
    values = ChunkedLogprobs.apply(
        states,
        head.weight,
        head.bias,
        targets,
        head.scale / temperature,
        None if head.softcap is None else head.softcap / temperature,
        chunk or chunks.rows_at_once(head.weight),
    )
    names = ("logprobs", "entropy", "correct")
    return {name: value[: len(batch.predict)] for name, value in zip(names, values, strict=True)}


def predictions(hidden: Tensor, batch: PackedBatch) -> tuple[Tensor, Tensor]:
    """Return hidden states [M, H] and targets [M] of the batch's N predictions. On some devices
    products are computed for M > N rows; the rows behind N are not read."""
    rows = chunks.round_up(len(batch.predict), hidden.device)
    places, targets = (chunks.pad_rows(item, rows) for item in (batch.predict_from, batch.predict))
    return hidden.index_select(0, places), targets


def summed_logprobs(hidden: Tensor, head: Head, batch: PackedBatch) -> dict[str, Tensor]:
    """Read `sum`, the scalar sum of the batch's log-probabilities, differentiable in hidden states,
    weight and bias; and the values of `token_logprobs` without gradient.

    The gradient is computed together with the value, chunk by chunk, and only scaled in backward,
    so each chunk's logits are computed once.
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
    """Read `logprobs` [A], the sum over each answer's predictions, and the values of
    `token_logprobs` as `tokens/...`."""
    tokens = token_logprobs(hidden, head, batch, **options)
    zeros = tokens["logprobs"].new_zeros(len(batch.answer_example))
    sums = zeros.index_add(0, batch.answer, tokens["logprobs"])
    return {"logprobs": sums, **{f"tokens/{name}": value for name, value in tokens.items()}}


def scores(hidden: Tensor, head: Head, batch: PackedBatch) -> dict[str, Tensor]:
    """Read `scores` [A] in float32: a head of one label at each answer's last token, as
    transformers' sequence classifiers do.

    The product is in float32 too: in 16 bits rewards above 1 would be rounded to steps of 0.008.
    """
    ends = hidden.index_select(0, batch.answer_end).float()
    return {"scores": head.in_float32().logits(ends).squeeze(-1)}


def token_scores(
    hidden: Tensor, head: Head, batch: PackedBatch, *, tokens: Tensor | None = None
) -> dict[str, Tensor]:
    """Read `scores` [T, L] in float32: a head of L labels at every token, or, with `tokens` [L],
    only these tokens' logits of a language-model head.

    Computing all T rows costs less than waiting until the host knows which ones are needed.
    """
    if tokens is not None:
        head = head.rows(tokens)
    return {"scores": head.logits(hidden)}


def hidden_at(places: Tensor) -> Callable[[Tensor, Head, PackedBatch], dict[str, Tensor]]:
    """Return a readout of `hidden` [P, H] at the row indices `places` [P]."""

    def readout(hidden: Tensor, head: Head, batch: PackedBatch) -> dict[str, Tensor]:
        return {"hidden": hidden.index_select(0, places)}

    return readout
