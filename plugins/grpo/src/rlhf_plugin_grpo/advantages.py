"""From the rewards of groups to advantages: on the host, in float64, over whole groups."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from rlhf_plugin_grpo.presets import Advantage, Scale

Rewards = NDArray[np.float64]
EPSILON = 1e-4
"""Added to a standard deviation, as in TRL."""
SAME = 1e-12
"""Rewards of a group that differ by less are equal."""


def advantages(rewards: Rewards, kind: Advantage, scale: Scale) -> Rewards:
    """Return the advantages of answers, rewards [groups, answers] -> the same shape.

    mean with the scale group is GRPO (arXiv 2402.03300), without a scale Dr. GRPO (arXiv
    2503.20783), with batch REINFORCE++ with a group baseline (arXiv 2501.03262) up to which
    deviation it is; leave_one_out is RLOO (arXiv 2402.14740).

    An answer without a score, nan, is in no mean and no standard deviation, and has the advantage
    0; so has the only answer of a group that is scored, unless nothing is subtracted.
    """
    scored = ~np.isnan(rewards)
    counts = scored.sum(1, keepdims=True)
    means = sum_of(rewards) / np.maximum(counts, 1)
    centred = rewards - means
    if kind == "none":
        centred = rewards
    elif kind == "leave_one_out":
        # r - (sum - r) / (n - 1) = n / (n - 1) (r - mean).
        centred = centred * counts / np.maximum(counts - 1, 1)
    if scale == "group":
        centred = centred / (deviations(rewards)[:, None] + EPSILON)
    elif scale == "batch":
        centred = centred / (deviations(rewards.reshape(1, -1))[0] + EPSILON)
    return np.where(scored, centred, 0.0)


def decoupled(rewards: Sequence[tuple[float, Rewards]], kind: Advantage, scale: Scale) -> Rewards:
    """Return the advantages of answers from several rewards, each with its weight, as GDPO (arXiv
    2601.05242) computes them with the kind mean and the scale group: the weighted sum of the
    advantages of each reward, normalised by mean and standard deviation over all answers of the
    rollout.

    A reward that does not score an answer adds 0 to its sum, as an average score does. An answer
    without any score is in no mean and no standard deviation, and has the advantage 0. So it is in
    TRL 1.16 with `multi_objective_aggregation` normalize_then_sum.
    """
    sums = np.sum([weight * advantages(each, kind, scale) for weight, each in rewards], axis=0)
    scored = np.any([~np.isnan(each) for _, each in rewards], axis=0)
    whole = np.where(scored, sums, np.nan).reshape(1, -1)
    return advantages(whole, "mean", "group").reshape(sums.shape)


def deviations(rewards: Rewards) -> Rewards:
    """Return the standard deviation of each group [groups], with n - 1 in the denominator; 0 for
    fewer than two scores."""
    counts = (~np.isnan(rewards)).sum(1, keepdims=True)
    means = sum_of(rewards) / np.maximum(counts, 1)
    squares = sum_of((rewards - means) ** 2)
    return np.sqrt(squares / np.maximum(counts - 1, 1))[:, 0]


def alike(rewards: Rewards) -> NDArray[np.bool_]:
    """Return whether all scores of a group are equal [groups]."""
    highest = np.where(np.isnan(rewards), -np.inf, rewards).max(1)
    lowest = np.where(np.isnan(rewards), np.inf, rewards).min(1)
    return highest - lowest < SAME


def overlong(lengths: NDArray[np.int64], most: int) -> Rewards:
    """Return the penalty of DAPO (arXiv 2503.14476 eq. 13) for answers of these lengths: 0 up to
    four fifths of `most`, which is the share of the paper, then falling to -1 at `most`."""
    start = 0.8 * most
    return -np.clip((lengths - start) / (most - start), 0.0, 1.0)


def sum_of(values: Rewards) -> Rewards:
    """Return the sum of each group without nan [groups, 1]."""
    return np.nansum(values, axis=1, keepdims=True)
