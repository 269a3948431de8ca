"""Readouts: log-probabilities, scores and hidden states, read inside an engine's forward.

Options of a readout are bound with `functools.partial`.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from rlhf.data.batch import PackedBatch
from rlhf.model.head import Head
from rlhf.model.sequence import all_rows, part_of_rank
from rlhf.readouts import logits as chunks
from rlhf.readouts.chunked import ChunkedLogprobs, chunked_sum, predictions

READ = ("logprobs", "entropy", "correct")
"""What is read of each prediction."""


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
    count = len(batch.predict)
    own = part_of_rank(count, head.sequence)
    states, targets = predictions(hidden, batch, own)
    values = ChunkedLogprobs.apply(
        states,
        head.weight,
        head.bias,
        targets,
        head.scale / temperature,
        None if head.softcap is None else head.softcap / temperature,
        chunk or chunks.rows_at_once(head.weight),
    )
    parts = (value[: own.stop - own.start] for value in values)
    whole = (all_rows(part, count, head.sequence) for part in parts)
    return dict(zip(READ, whole, strict=True))


def summed_logprobs(hidden: Tensor, head: Head, batch: PackedBatch) -> dict[str, Tensor]:
    """Read `sum`, the scalar sum of the batch's log-probabilities, differentiable in hidden states,
    weight and bias; and the values of `token_logprobs` without gradient.

    Each chunk's logits are computed only once (`chunked_sum`).
    """
    transform: dict[str, Any] = {"scale": head.scale, "softcap": head.softcap}

    def read(
        rows: slice, logits: Tensor, targets: Tensor, with_gradient: bool
    ) -> tuple[Tensor, Tensor]:
        needs_copy = with_gradient and chunks.overwrites(logits)
        values = chunks.read(logits.clone() if needs_copy else logits, targets, **transform)
        if with_gradient:
            ones = torch.ones_like(values[0])
            logits = chunks.logit_gradient(logits, targets, values[0], ones, **transform)
        return values[1:], logits

    total, values = chunked_sum(
        read, lambda values: values[0].sum(), hidden, head, batch, names=READ
    )
    return {"sum": total, **values}


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
    transformers' sequence classifiers do; of a head of L labels [A, L].

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
