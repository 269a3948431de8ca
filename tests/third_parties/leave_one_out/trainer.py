"""RLOO (arXiv 2402.14740): the advantage of an answer is its reward minus the mean reward of the
other answers to the same prompt."""

from collections.abc import Sequence
from functools import partial

import torch
from rlhf_trainer_leave_one_out import LeaveOneOutConfig
from torch import Tensor

from rlhf.readouts import answer_logprobs
from rlhf.trainer import Answer, Example, Loss, PackedBatch, Row, Run, Term, Trainer, answer_seeds


class LeaveOneOut(Trainer):
    row_format = "demonstration"
    config: LeaveOneOutConfig

    def example(self, row: Row) -> Example:
        return Example(row.prompt, row.answers, {"advantage": [0.0], "reward": [0.0]})

    def setup(self, run: Run) -> None:
        self.run, self.policy = run, run.load("policy", dropout=False)

    def rollout(
        self, examples: Sequence[Example], step: int, seeds: Sequence[int]
    ) -> Sequence[Example]:
        count = self.config.answers
        samples = self.run.sample(
            self.policy,
            [each.prompt for each in examples for _ in range(count)],
            seeds=answer_seeds(seeds, count),
            max_new_tokens=self.config.max_new_tokens,
            temperature=self.config.temperature,
        )
        made = []
        for number, example in enumerate(examples):
            drawn = [each.tokens for each in samples[number * count : (number + 1) * count]]
            rewards = torch.tensor([evenness(tokens) for tokens in drawn])
            values = {"advantage": advantages(rewards).tolist(), "reward": rewards.tolist()}
            made.append(Example(example.prompt, [*map(Answer, drawn)], values))
        return made

    def loss(self, batch: PackedBatch) -> Loss:
        read = partial(answer_logprobs, temperature=self.config.temperature)
        logprobs = self.policy(batch, read)["logprobs"]
        gain = (batch.values["advantage"] * logprobs).sum()
        reward = batch.values["reward"].sum()
        return Loss((Term(-gain, per="answers"),), {"reward": (reward, "answers")})


def evenness(tokens: Sequence[int]) -> float:
    """Return the share of even token ids."""
    return sum(token % 2 == 0 for token in tokens) / len(tokens)


def advantages(rewards: Tensor) -> Tensor:
    """Return each reward [K] minus the mean of the others."""
    return (rewards - rewards.mean()) * len(rewards) / (len(rewards) - 1)
