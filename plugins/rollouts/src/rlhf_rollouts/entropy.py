"""The readout of a policy whose entropy is part of the loss."""

from torch import Tensor

from rlhf.readouts import Head, chunked_sum, token_logprobs, transformed
from rlhf.trainer import PackedBatch

__all__ = ["logprobs_and_entropy"]

ROWS = 512
"""Predictions whose logits exist at the same time; several tensors of float32 have their shape."""


def logprobs_and_entropy(
    hidden: Tensor, head: Head, batch: PackedBatch, *, temperature: float = 1.0
) -> dict[str, Tensor]:
    """Read the values of `token_logprobs`, and `entropy_sum`, the scalar sum of the entropies of
    the batch's N predictions in nats, differentiable in hidden states, weight and bias.

    The logits are computed once more than for log-probabilities. With p = softmax(x) and
    H = -sum(p log p), the gradient of H is -p (log p + H).
    """
    scale = head.scale / temperature
    softcap = None if head.softcap is None else head.softcap / temperature

    def read(
        rows: slice, logits: Tensor, targets: Tensor, with_gradient: bool
    ) -> tuple[Tensor, Tensor]:
        values = transformed(logits.clone(), scale, softcap)
        logprobs = values.log_softmax(-1)
        entropies = -(logprobs.exp() * logprobs).sum(-1)
        if with_gradient:
            gradient = -logprobs.exp() * (logprobs + entropies[:, None]) * scale
            if softcap is not None:
                gradient = gradient * (1 - (values / softcap).square())
            logits = gradient.to(logits.dtype)
        return entropies[None], logits

    total, _ = chunked_sum(
        read, lambda values: values[0].sum(), hidden, head, batch, names=("entropy",), chunk=ROWS
    )
    return token_logprobs(hidden, head, batch, temperature=temperature) | {"entropy_sum": total}
