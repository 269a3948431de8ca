"""Metrics of a process reward model: sums over micro-batches, and what is derived from them."""

import math
from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

BINS = 512
FINE = 0.05
FAR = 30.0
"""Log-odds are counted in 512 bins from -30 to 30. The bins are narrow near 0 (0.0013) and wider
away from it: 0.08 at a probability of 0.95, beyond that 2.5 % of the log-odds."""


def step_sums(
    odds: Tensor, labels: Tensor, example: Tensor, num_examples: int
) -> dict[str, tuple[Tensor, str]]:
    """Return the metrics of odds [T] and labels [T], nan for tokens without one; `example` [T] is
    each token's example. A label above 0.5 means right."""
    known = ~labels.isnan()
    right, said_right = labels > 0.5, odds > 0
    wrong, said_wrong = known & ~right, known & ~said_right
    agreed = first(wrong, example, num_examples) == first(said_wrong, example, num_examples)
    return {
        "accuracy": ((known & (right == said_right)).sum(), "labels"),
        "first_error_accuracy": (agreed.sum(), "examples"),
        "wrong/hit": ((wrong & said_wrong).sum(), ""),
        "wrong/all": (wrong.sum(), ""),
        "wrong/said": (said_wrong.sum(), ""),
        "histogram/wrong": (histogram(odds, wrong), ""),
        "histogram/right": (histogram(odds, known & right), ""),
    }


def first(marked: Tensor, example: Tensor, num_examples: int) -> Tensor:
    """Return the row index [E] of each example's first token in `marked` [T], T if it has none."""
    size = len(marked)
    places = torch.arange(size, device=marked.device)
    firsts = places.new_full((num_examples + 1,), size)
    owner = torch.where(marked, example, num_examples)
    return firsts.scatter_reduce(0, owner, places, "amin")[:num_examples]


def histogram(odds: Tensor, chosen: Tensor) -> Tensor:
    """Return how many of the `chosen` among odds [T] lie in each bin, [BINS] in float64."""
    scale = math.log1p(FAR / FINE)
    near = odds.sign() * torch.log1p(odds.abs() / FINE) / scale
    bins = ((near + 1) / 2 * BINS).long().clamp(0, BINS - 1)
    counts = torch.zeros(BINS + 1, dtype=torch.float64, device=odds.device)
    ones = torch.ones_like(odds, dtype=torch.float64)
    return counts.index_add(0, torch.where(chosen, bins, BINS), ones)[:BINS]


def derived(sums: Mapping[str, Any]) -> dict[str, float]:
    """Return F1 of wrong steps and, if both classes occur, the area under the ROC curve."""
    said_or_wrong = sums["wrong/all"] + sums["wrong/said"]
    metrics = {"f1_wrong": 2 * sums["wrong/hit"] / max(said_or_wrong, 1.0)}
    wrong, right = sums["histogram/wrong"], sums["histogram/right"]
    if any(wrong) and any(right):
        metrics["auc"] = area(wrong, right)
    return metrics


def area(wrong: Sequence[float], right: Sequence[float]) -> float:
    """Return the share of pairs of a right and a wrong step in which the right one has the higher
    log-odds, from their histograms.

    A pair in the same bin counts one half (Mann and Whitney 1947), so the error is at most half
    the share of such pairs.
    """
    below = [0.0, *accumulate(wrong)]
    won = sum(r * (b + w / 2) for r, b, w in zip(right, below, wrong, strict=False))
    return won / (sum(right) * sum(wrong))
