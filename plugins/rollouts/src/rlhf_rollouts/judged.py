"""The answers of a rollout with their rewards, and what metrics need of them."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from attrs import field, frozen
from numpy.typing import NDArray

from rlhf.plugin import documented
from rlhf_rollouts.rewards import Scores
from rlhf_rollouts.written import Group

__all__ = ["Judged"]


@documented
@frozen(kw_only=True)
class Judged:
    """The answers of a rollout with their rewards, as [groups, answers]; nan where there is no
    score."""

    groups: Sequence[Group]
    """The `Sample`s of each prompt."""
    by_name: Mapping[str, NDArray[np.float64]]
    """Each reward without its weight, by its name in metrics."""
    total: NDArray[np.float64]
    """The weighted sum."""
    weights: Mapping[str, float] = field(factory=dict)
    """The weight of each reward in the total, by its name; 1 for others."""

    @classmethod
    def of(cls, groups: Sequence[Group], scores: Scores) -> "Judged":
        """Return the answers with the scores of all of them, in the order of the groups."""
        shape = (len(groups), len(groups[0]))
        by_name = {name: np.reshape(each, shape) for name, each in scores.by_name.items()}
        total = np.reshape(scores.total, shape)
        return cls(groups=groups, by_name=by_name, total=total, weights=scores.weights)

    @property
    def weighted(self) -> list[tuple[float, NDArray[np.float64]]]:
        """The rewards that have a weight, each with it."""
        pairs = [(self.weights.get(name, 1.0), each) for name, each in self.by_name.items()]
        return [(weight, each) for weight, each in pairs if weight]

    @property
    def means(self) -> NDArray[np.float64]:
        """The mean reward of each group [groups, 1] over its scored answers; 0 if there are
        none."""
        counts = (~np.isnan(self.total)).sum(1, keepdims=True)
        return np.nansum(self.total, axis=1, keepdims=True) / np.maximum(counts, 1)

    @property
    def lengths(self) -> NDArray[np.int64]:
        """Tokens of each answer, with what tools have returned."""
        return np.array([[len(sample.tokens) for sample in group] for group in self.groups])

    @property
    def written(self) -> NDArray[np.int64]:
        """Tokens of each answer that the policy wrote."""
        return np.array(
            [[int((~np.isnan(sample.logprobs)).sum()) for sample in group] for group in self.groups]
        )

    @property
    def finished(self) -> NDArray[np.bool_]:
        """Whether each answer has ended before it was cut."""
        return np.array([[sample.finished for sample in group] for group in self.groups])

    def values(self) -> list[dict[str, Any]]:
        """Return what `rlhf_rollouts.metrics` needs of each group, by name: all of it per answer,
        so that core can divide a group that is larger than `batch.tokens`."""
        lengths, finished = self.written, self.finished.astype(float)
        scored = {"": self.total, **{f"/{name}": each for name, each in self.by_name.items()}}
        return [
            {
                "length": lengths[place].astype(float),
                "finished": finished[place],
                "finished_length": lengths[place] * finished[place],
                **{f"reward{name}": np.nan_to_num(each[place]) for name, each in scored.items()},
                **{
                    f"scored{name}": (~np.isnan(each[place])).astype(float)
                    for name, each in scored.items()
                },
            }
            for place in range(len(self.groups))
        ]
