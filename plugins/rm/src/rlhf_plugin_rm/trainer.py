"""Reward models: a scalar head on the backbone learns which of a prompt's answers is better.

Bradley-Terry loss of InstructGPT (arXiv 2203.02155) with the margin of Llama 2 (arXiv 2307.09288).
Departure from common practice: a prompt is computed once for all its answers, and each reward is
read at the last token of its answer, so neither padding nor another row can change it. In a
conversation that is the last token of the whole rendering, where plain transformers reads it.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from rlhf.readouts import scores
from rlhf.trainer import Classifier, Example, Loss, PackedBatch, Run, Term, Trainer
from rlhf_plugin_rm import losses
from rlhf_plugin_rm.scorer import Scorer


class RMTrainer(Trainer):
    row_format = "preference"
    renders_whole = True
    scorer = Scorer

    def example(self, row: Any) -> Example:
        margin = self.config.margin * (row.columns.get("margin") or 0.0)
        return Example(row.prompt, row.answers, {"rank": row.columns["ranks"], "margin": margin})

    def classifiers(self, config: Any) -> list[Classifier]:
        return [Classifier(task="sequence")]

    def setup(self, run: Run) -> None:
        self.policy = run.load("policy", task="sequence", dropout=False)

    def loss(self, batch: PackedBatch) -> Loss:
        rewards = self.policy(batch, scores)["scores"]
        table = by_example(rewards, batch, fill=0.0)
        ranks = by_example(batch.values["rank"], batch, fill=torch.nan)
        weights = losses.pair_weights(ranks)
        terms = [Term(self._ranking(table, ranks, weights, batch.values["margin"]), per="examples")]
        if self.config.centring:
            pull = losses.centring(table, weights).sum()
            terms.append(Term(pull, per="examples", weight=self.config.centring))
        return Loss(tuple(terms), metrics(rewards.detach(), table.detach(), weights))

    def _ranking(self, rewards: Tensor, ranks: Tensor, weights: Tensor, margin: Tensor) -> Tensor:
        """Return the sum over examples of the loss of their answers."""
        if self.config.ranking == "plackett_luce":
            return losses.plackett_luce(rewards, ranks, margin).sum()
        pairs = losses.bradley_terry(losses.differences(rewards), margin[:, None, None])
        return (weights * pairs).sum()

    def score(self, batch: PackedBatch) -> Tensor:
        """Return the reward of each answer [A]."""
        return self.policy(batch, scores)["scores"]

    def derive(self, sums: Mapping[str, Any]) -> Mapping[str, float]:
        """Return the standard deviation of the rewards."""
        count = max(sums["reward_count"], 1.0)
        mean = sums["reward_sum"] / count
        return {"std_reward": max(sums["reward_square"] / count - mean**2, 0.0) ** 0.5}

    def model_config(self, metrics: Mapping[str, float]) -> Mapping[str, Any]:
        """Return the mean and deviation of the rewards of the held-out rows.

        Without such rows they are null, since those of the initial model no longer hold.
        """
        return {
            "reward_mean": metrics.get("eval/mean_reward"),
            "reward_std": metrics.get("eval/std_reward"),
            "reward_normalise": self.config.normalise,
        }


def by_example(values: Tensor, batch: PackedBatch, *, fill: float) -> Tensor:
    """Return values [A] as [E, K]: a row for each example, filled to the longest list of
    answers."""
    counts = [len(answers) for _, answers in batch.spans]
    slots = torch.tensor([slot for count in counts for slot in range(count)], dtype=torch.long)
    table = values.new_full((len(counts), max(counts, default=0)), fill)
    # A plain copy would wait for the device.
    slots = slots.to(values.device, non_blocking=True)
    return table.index_put((batch.answer_example, slots), values)


def metrics(rewards: Tensor, table: Tensor, weights: Tensor) -> dict[str, tuple[Tensor, str]]:
    """Return the metrics by TRL's names: the share of pairs in the right order, their difference,
    and statistics of the rewards [A]."""
    gaps = losses.differences(table)
    exact = rewards.double()
    bound = rewards.new_full((1,), torch.inf)
    return {
        "accuracy": ((weights * (gaps > 0)).sum(), "examples"),
        "margin": ((weights * gaps).sum(), "examples"),
        "mean_reward": (rewards.sum(), "answers"),
        "min_reward": (torch.cat([rewards, bound]).min(), "min"),
        "max_reward": (torch.cat([rewards, -bound]).max(), "max"),
        "reward_sum": (exact.sum(), ""),
        "reward_square": (exact.square().sum(), ""),
        "reward_count": (torch.ones_like(exact).sum(), ""),
    }
