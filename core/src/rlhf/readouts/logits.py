"""A chunk of logits: what is read of each row, and the gradient for backward.

With kernels each is one pass over the logits in their own dtype, elsewhere a few of torch's
operators in float32. Both give the same numbers, except for rounding and for ties of the
most likely token.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from rlhf.devices import fused_on
from rlhf.model.accelerated import kernels_on

LOGIT_ROWS = 2048
"""Rows of logits that exist at the same time without fused kernels: 1.2 GiB in float32 at a
vocabulary of 152k."""
FUSED_BYTES = 5 << 27
"""Bytes of logits that exist at the same time with fused kernels: 2,048 rows in 16 bits at a
vocabulary of 152k."""
ROW_BLOCK = 256
"""Rows of logits come in multiples of this with fused kernels (benchmarks/NOTES.md, ZeRO 1 and 2 on
several GPUs)."""


def rows_at_once(weight: Tensor) -> int:
    """Return how many rows of logits of a head `weight` [V, H] exist at the same time."""
    if kernels_on(weight.device) is None:
        return LOGIT_ROWS
    rows = FUSED_BYTES // (weight.shape[0] * weight.element_size())
    return max(ROW_BLOCK, rows // ROW_BLOCK * ROW_BLOCK)


def round_up(rows: int, device: torch.device) -> int:
    """Return the number of rows for which products with a head are computed on `device`.

    For each new shape the library may load another kernel, and the host then waits until the device
    is idle. With as many rows as predictions, most traced steps had such a wait.
    """
    return -(-rows // ROW_BLOCK) * ROW_BLOCK if fused_on(device.type) else rows


def pad_rows(tensor: Tensor, rows: int) -> Tensor:
    """Return `tensor` [n] or [n, m] padded with zeros to so many `rows`."""
    return torch.nn.functional.pad(tensor, (0, 0) * (tensor.dim() - 1) + (0, rows - len(tensor)))


def each_chunk(
    act: Callable[[slice, Tensor], None],
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    chunk: int,
) -> None:
    """Call `act(rows, logits)` for every `chunk` rows of hidden states [N, H] and their raw logits
    [n, V]. Only `act` holds the logits, so one chunk is released before the next is computed."""
    for start in range(0, len(hidden), chunk):
        rows = slice(start, min(start + chunk, len(hidden)))
        act(rows, torch.nn.functional.linear(hidden[rows], weight, bias))


def read(logits: Tensor, targets: Tensor, *, scale: float, softcap: float | None) -> Tensor:
    """Return what is read of raw logits [n, V], with x = cap(scale * logits): the log of the
    softmax's denominator, the log-probability of the target, the entropy in nats, and 1 where the
    most likely token is the target [4, n], float32. May overwrite the logits."""
    if kernels := kernels_on(logits.device):
        return kernels.read_rows(logits, targets, scale, softcap)
    values = transformed(logits, scale, softcap)
    largest, most_likely = values.max(-1)
    target = values.gather(-1, targets[:, None]).squeeze(-1)
    shifted = values.sub_(largest[:, None])
    exponentials = shifted.exp()
    total = exponentials.sum(-1)
    normaliser = total.log() + largest
    # With p = exp(x - normaliser), -sum(p * log p) = log(total) - sum(exp(s) * s) / total, where
    # s = x - largest.
    entropy = total.log() - exponentials.mul_(shifted).sum(-1) / total
    correct = (most_likely == targets).float()
    return torch.stack((normaliser, target - normaliser, entropy, correct))


def overwrites(logits: Tensor) -> bool:
    """Return whether `read` overwrites these logits."""
    return logits.dtype == torch.float32 and kernels_on(logits.device) is None


def logit_gradient(
    logits: Tensor,
    targets: Tensor,
    normaliser: Tensor,
    gradient: Tensor,
    *,
    scale: float,
    softcap: float | None,
) -> Tensor:
    """Return the gradient for raw logits [n, V], in their dtype, given the `gradient` [n] for the
    targets' log-probabilities. Overwrites the logits.

    With p = softmax(x): d log p[target] / dx = onehot(target) - p, then times the derivative of
    the soft cap, 1 - (x / softcap)^2, and `scale`.
    """
    if kernels := kernels_on(logits.device):
        return kernels.logit_gradient_(logits, targets, normaliser, gradient, scale, softcap)
    values = transformed(logits, scale, softcap)
    by_cap = None if softcap is None else 1 - (values / softcap).square_()
    result = values.sub_(normaliser[:, None]).exp_().neg_()
    places = targets[:, None]
    result.scatter_add_(-1, places, torch.ones_like(places, dtype=result.dtype))
    result.mul_(gradient[:, None] * scale)
    if by_cap is not None:
        result.mul_(by_cap)
    return result.to(logits.dtype)


def transformed(logits: Tensor, scale: float, softcap: float | None) -> Tensor:
    """Return cap(scale * logits) in float32; in place if they are float32 already, since a chunk of
    logits is too large for a copy."""
    values = logits.float() if scale == 1.0 else logits.float().mul_(scale)
    return values if softcap is None else values.div_(softcap).tanh_().mul_(softcap)
