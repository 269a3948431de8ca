"""What a run on answers with rewards reports, under TRL's names where it has them."""

import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from rlhf.errors import RLHFError
from rlhf.trainer import PackedBatch, Run
from rlhf_rollouts.ratios import sampling_ratios

__all__ = [
    "DRAWING", "JUDGING", "Metrics", "check_names", "deviations_of", "least", "measured",
    "of_answers", "of_clipping", "of_sampling",
]  # fmt: skip

Metrics = dict[str, tuple[Tensor, str] | float]
DRAWING, JUDGING = "rollout/seconds", "rewards/seconds"
"""Seconds in which the answers of a rollout were written, and scored."""
MEASURED = (DRAWING, JUDGING, "sync/seconds", "sync/bytes")
"""What `measured` returns; rewards cannot log metrics of these names."""


def of_answers(batch: PackedBatch, names: Sequence[str]) -> Metrics:
    """Return metrics of the answers and their rewards from `Judged.values`; `names` are those of
    the rewards."""
    values = batch.values
    length, finished = values["length"], values["finished"]
    metrics: Metrics = {
        "reward": (values["reward"].sum(), "scored"),
        "unscorable": ((1 - values["scored"]).sum(), "answers"),
        "completions/mean_length": (length.sum(), "answers"),
        "completions/min_length": (least(length), "min"),
        "completions/max_length": (-least(-length), "max"),
        "completions/clipped_ratio": ((1 - finished).sum(), "answers"),
        "completions/mean_terminated_length": (values["finished_length"].sum(), "finished"),
    }
    for name in names:
        rewards, scored = values[f"reward/{name}"].double(), f"scored/{name}"
        metrics[f"rewards/{name}/mean"] = (rewards.sum(), scored)
        sums = [values[scored].double().sum(), rewards.sum(), rewards.square().sum()]
        metrics[moments(name)] = (torch.stack(sums), "")
    return metrics


def moments(name: str) -> str:
    """Return the name of the sum from which the deviation of a reward follows."""
    return f"rewards/{name}/moments"


def deviation(count: float, total: float, squares: float) -> float:
    """Return the standard deviation of `count` numbers from their sum and that of their squares,
    with count - 1 in the denominator; 0 for fewer than two."""
    spread = squares - total * total / max(count, 1)
    return math.sqrt(max(spread, 0.0) / max(count - 1, 1))


def deviations_of(sums: Mapping[str, Any], names: Sequence[str]) -> dict[str, float]:
    """Return the standard deviation of each reward over all answers."""
    return {f"rewards/{name}/std": deviation(*sums[moments(name)]) for name in names}


def of_clipping(below: Tensor, above: Tensor) -> Metrics:
    """Return how many predictions have a ratio that is clipped `below` and `above` [N], bool."""
    return {
        "clip_ratio/low_mean": (below.float().sum(), "tokens"),
        "clip_ratio/high_mean": (above.float().sum(), "tokens"),
        "clip_ratio/region_mean": ((below | above).float().sum(), "tokens"),
    }


def of_sampling(old: Tensor, drawn: Tensor, batch: PackedBatch, level: str) -> Metrics:
    """Return how far the log-probabilities of the predictions of a batch [N] in training, when the
    answers were written, differ from those with which they were drawn. The ratios are those that
    the `level` of a correction bounds."""
    difference = (old - drawn).abs()
    ratio = sampling_ratios(old, drawn, batch.answer, batch.num_answers, level=level)
    return {
        "sampling/sampling_logp_difference/mean": (difference.sum(), "tokens"),
        "sampling/sampling_logp_difference/max": (-least(-difference, 0.0), "max"),
        "sampling/importance_sampling_ratio/mean": (ratio.sum(), "tokens"),
        "sampling/importance_sampling_ratio/min": (least(ratio, 1.0), "min"),
        "sampling/importance_sampling_ratio/max": (-least(-ratio, -1.0), "max"),
    }


def measured(run: Run, seconds: Mapping[str, float]) -> dict[str, tuple[float, float]]:
    """Return how long a rollout of training took and what its engine has measured since the last
    one, each as a sum and what it is divided by."""
    values = {**run.engine_metrics, **seconds}
    run.engine_metrics.clear()
    return {name: (value, 1.0) for name, value in values.items()}


def check_names(logged: Collection[str]) -> None:
    """Raise RLHFError for a name among what rewards have logged that is one of `MEASURED`."""
    for name in MEASURED:
        if name in logged:
            raise RLHFError(
                f"log_metric({name!r}): the trainer has a metric of this name; use another one"
            )


def least(values: Tensor, without: float = math.inf) -> Tensor:
    """Return the smallest value, `without` any that number."""
    if not len(values):
        return values.new_full((), without)
    return values.min()
