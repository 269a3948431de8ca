"""Whether the engine that writes answers and the trainer compute the same probabilities."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from rlhf.errors import SameOnAllRanks

__all__ = ["check_agreement"]


def check_agreement(
    drawn: Sequence[Sequence[float]],
    trained: Sequence[Any],
    *,
    bound: float,
    setting: str,
    step: int,
) -> str:
    """Return a line for `run.notes` on how far the log-probabilities of the tokens of each answer
    differ between sampling, `drawn`, and the trainer's forward at the same temperature, `trained`.

    Raises RLHFError, the same on every rank, if they differ by more than `bound` on average, in
    nats; `setting` is what the bound is called, and `step` (from 0) the first step that is trained
    on the answers. Both must be from the same weights. In the first rollout a new adapter changes
    nothing yet and no weights can be old, so later ones are compared too.
    """
    sampling, training = (np.concatenate([*map(np.asarray, each)]) for each in (drawn, trained))
    # What a tool has returned was not drawn.
    own = ~np.isnan(sampling)
    differences = np.abs(sampling[own].astype(np.float64) - training[own].astype(np.float64))
    mean, largest, count = differences.mean(), differences.max(), differences.size
    if not mean <= bound:
        raise SameOnAllRanks(
            f"the log-probabilities of the {count:,} tokens of the rollout of step {step + 1} "
            f"differ by {mean:.2g} on average between sampling and training, at most by "
            f"{largest:.2g}, but {setting} is {bound:g}: the engine may use another temperature, "
            f"an adapter less, older weights or another precision; correct it, or raise {setting}"
        )
    return (
        f"agreement  log-probabilities of {count:,} tokens differ by {mean:.1e} on average between "
        f"sampling and training, at most by {largest:.1e}"
    )
