"""avg@k and pass@k: how many of the answers to held-out prompts are right."""

from math import comb

import numpy as np
from numpy.typing import NDArray

from rlhf_rollouts.judged import Judged
from rlhf_rollouts.rewards import Scores

__all__ = ["pass_at", "passing", "rollout_sums"]

SAME = 1e-12
"""Rewards that differ by less count as equal: a weighted sum may be rounded below its threshold."""


def rollout_sums(
    scores: Scores, judged: Judged, *, threshold: float | None
) -> dict[str, tuple[float, float]]:
    """Return the metrics of a rollout for `Reported.add`: what its rewards have logged, and with
    `threshold`, which is for held-out prompts, `passing`."""
    found = {} if threshold is None else passing(judged.total, threshold)
    return {**scores.metrics, **found}


def passing(rewards: NDArray[np.float64], threshold: float) -> dict[str, tuple[float, float]]:
    """Return metrics of rewards [groups, answers], each as a sum and the number of its addends.

    An answer passes if its reward is at least `threshold`. avg@K is the share of the K answers to a
    prompt that pass, and pass@k the probability that one of k answers does, for k = 2, 4, ... and
    K. An answer without a reward, nan, does not exist here; a prompt with fewer than k others is
    not in pass@k.
    """
    size = rewards.shape[1]
    scored = (~np.isnan(rewards)).sum(1)
    passed = (rewards >= threshold - SAME).sum(1)
    groups = [(int(n), int(c)) for n, c in zip(scored, passed, strict=True) if n]
    found = {f"avg@{size}": (sum(c / n for n, c in groups), float(len(groups)))}
    for k in sorted({2**power for power in range(1, size.bit_length()) if 2**power < size}):
        found[f"pass@{k}"] = over_groups(groups, k)
    if size > 1:
        found[f"pass@{size}"] = over_groups(groups, size)
    return found


def over_groups(groups: list[tuple[int, int]], k: int) -> tuple[float, float]:
    """Return the sum of pass@k over the groups with at least k answers, and their number."""
    values = [pass_at(n, c, k) for n, c in groups if n >= k]
    return sum(values), float(len(values))


def pass_at(n: int, c: int, k: int) -> float:
    """Return the probability that one of k answers passes, estimated without bias from n answers of
    which c do: 1 - C(n - c, k) / C(n, k) (arXiv 2107.03374 eq. 1)."""
    return 1 - comb(n - c, k) / comb(n, k)
