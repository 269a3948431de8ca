"""The critic's values and their loss. N predictions."""

import torch
from torch import Tensor

from rlhf.readouts import Head
from rlhf.trainer import PackedBatch


def token_values(hidden: Tensor, head: Head, batch: PackedBatch) -> dict[str, Tensor]:
    """Read `values` [N] in float32: a head of one label at the token before each predicted one,
    which is the state in which that token is chosen.

    The product is in float32 too, as for rewards (`rlhf.readouts.scores`).
    """
    states = hidden.index_select(0, batch.predict_from).float()
    return {"values": head.in_float32().logits(states).squeeze(-1)}


def value_loss(
    values: Tensor, old: Tensor, returns: Tensor, clip: float | None
) -> tuple[Tensor, Tensor]:
    """Return the loss of each value [N], and whether clipping decides it [N], bool.

    1/2 max((V - R)^2, (V' - R)^2), where V' is V at most `clip` from the value `old` before the
    updates of the rollout, as in OpenAI's baselines.
    """
    errors = (values - returns).square()
    if clip is None:
        return errors / 2, torch.zeros_like(errors, dtype=torch.bool)
    bounded = old + (values - old).clamp(-clip, clip)
    clipped = (bounded - returns).square()
    return torch.maximum(errors, clipped) / 2, clipped > errors
