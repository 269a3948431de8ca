"""The losses of unpaired preferences, and the range of weights that the paper gives."""

import torch
from torch import Tensor

LEAST_BALANCE, MOST_BALANCE = 1.0, 4 / 3
"""Eq. 8 of arXiv 2402.01306."""


def kto(
    logratios: Tensor,
    desirable: Tensor,
    reference_point: Tensor | float,
    *,
    beta: float,
    desirable_weight: float,
    undesirable_weight: float,
) -> Tensor:
    """Return the loss [A] of each answer from its log-ratio of policy to reference [A] and
    `desirable` [A], 1 or 0.

    lambda_D (1 - sigmoid(beta (r - z))) for a desirable answer and lambda_U (1 - sigmoid(beta
    (z - r))) for another: eq. 7 of arXiv 2402.01306, with z its estimate of KL(policy ||
    reference), which gets no gradient. At z = 0 these are the two halves of APO-zero (arXiv
    2408.06266), here unpaired.
    """
    sign = 2 * desirable - 1
    weight = desirable_weight * desirable + undesirable_weight * (1 - desirable)
    return weight * torch.sigmoid(-sign * beta * (logratios - reference_point))


def divergence(logratios: Tensor) -> Tensor:
    """Return the reference point z, a scalar, from the log-ratios [A] of the step's mismatched
    answers: their mean, at least zero (section 4.1 of arXiv 2402.01306)."""
    return logratios.mean().clamp(min=0).detach()


def balance_advice(
    num_desirable: int, num_undesirable: int, desirable_weight: float, undesirable_weight: float
) -> str | None:
    """Return a warning if the weights are outside the paper's range for these counts, else
    None."""
    good, bad = desirable_weight * num_desirable, undesirable_weight * num_undesirable
    counts = f"{num_desirable:,} desirable and {num_undesirable:,} undesirable rows"
    if not good or not bad:
        return f"only one side of {counts} has any weight, so nothing bounds the rewards"
    if LEAST_BALANCE <= good / bad <= MOST_BALANCE:
        return None
    if good < bad:
        name, ends = "desirable_weight", [bad / num_desirable * x for x in (1, MOST_BALANCE)]
    else:
        name, ends = "undesirable_weight", [good / num_undesirable / x for x in (MOST_BALANCE, 1)]
    return (
        f"{counts} with the weights {desirable_weight:g} and {undesirable_weight:g} have the ratio "
        f"{good / bad:.3g}, outside 1 to 1.33 (eq. 8 of arXiv 2402.01306); "
        f"set kto.{name} between {ends[0]:.3g} and {ends[1]:.3g}"
    )
