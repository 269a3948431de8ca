"""Trainers for tests of the loop: one with a survey, one whose loss is not finite for one row."""

import os
from collections.abc import Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import torch

import sft_runs
from rlhf.data.batch import PackedBatch
from rlhf.data.example import Answer, Example
from rlhf.readouts import answer_logprobs, token_logprobs
from rlhf.request.reader import read_config
from rlhf.train.rank import run_rank
from rlhf.trainer import Loss, Sample, Term, Trainer


def run_odd(trainer: str, words: list[str], cache: str) -> tuple[int, list[dict[str, Any]]]:
    """A run of another trainer under SFT's name and section."""
    os.environ["RLHF_CACHE"] = cache
    request = read_config("sft", overrides=words)
    plugin = attrs.evolve(request.plugin, trainer=f"odd_trainers:{trainer}")
    _, ended = run_rank(attrs.evolve(request, plugin=plugin))
    return 143 if ended == "signal" else 0, sft_runs.read_metrics(Path(request.config.output or ""))


class SurveyTrainer(Trainer):
    """Each answer against the mean of the whole step: not a sum over micro-batches."""

    row_format = "demonstration"
    num_surveys = 0

    def example(self, row: Any) -> Example:
        return Example(row.prompt, row.answers, {"length": float(len(row.answers[0].tokens))})

    def setup(self, run: Any) -> None:
        self.policy = run.load("policy")

    def survey(self, batch: PackedBatch) -> dict[str, torch.Tensor]:
        assert not torch.is_grad_enabled()
        self.num_surveys += 1
        return {
            "logprob": self.policy(batch, answer_logprobs)["logprobs"],
            "length": batch.values["length"],
        }

    def loss(self, batch: PackedBatch) -> Loss:
        own = self.policy(batch, answer_logprobs)["logprobs"]
        mean = batch.step["logprob"].mean()
        now = batch.step["logprob"][batch.step["answers"]]
        assert torch.equal(batch.step["length"][batch.step["examples"]], batch.values["length"])
        # The survey is of the same weights, so it agrees with the pass that has a gradient.
        assert torch.allclose(own, now, atol=1e-4)
        return Loss(
            (Term(((own - mean) ** 2).sum(), per="length"),),
            {
                "spread": ((own.detach() - mean).abs().sum(), "answers"),
                "count": (own.sum() * 0, ""),
            },
        )

    def derive(self, sums: Any) -> dict[str, float]:
        return {"derived": sums["count"] + 1.0}

    def state(self) -> dict[str, Any]:
        return {"num_surveys": self.num_surveys}

    def load_state(self, state: Any) -> None:
        self.num_surveys = state["num_surveys"]


class PoisonedTrainer(Trainer):
    """Not a number for the row whose answer is the longest."""

    row_format = "demonstration"

    def example(self, row: Any) -> Example:
        poison = float("the poisoned row" in str(row.columns))
        return Example(row.prompt, row.answers, {"poison": poison})

    def setup(self, run: Any) -> None:
        self.policy = run.load("policy")

    def loss(self, batch: PackedBatch) -> Loss:
        logprobs = self.policy(batch, token_logprobs)["logprobs"]
        poison = torch.where(batch.values["poison"] > 0, torch.nan, 0.0).sum()
        return Loss((Term(-logprobs.sum() + poison, per="tokens"),))


class GreedyTrainer(Trainer):
    """Wants more memory than there is, as an accelerator would say it."""

    row_format = "demonstration"

    def example(self, row: Any) -> Example:
        return Example(row.prompt, row.answers)

    def setup(self, run: Any) -> None:
        self.policy = run.load("policy")

    def loss(self, batch: PackedBatch) -> Loss:
        if not batch.tokens.is_meta:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        return Loss((Term(-self.policy(batch, token_logprobs)["logprobs"].sum(), "tokens"),))


class UnevenTrainer(Trainer):
    """Gives a metric on the second rank only, in training."""

    row_format = "demonstration"
    in_training = True

    def example(self, row: Any) -> Example:
        return Example(row.prompt, row.answers)

    def setup(self, run: Any) -> None:
        self.policy = run.load("policy")

    def loss(self, batch: PackedBatch) -> Loss:
        logprobs = self.policy(batch, token_logprobs)["logprobs"]
        uneven = self.in_training == torch.is_grad_enabled() and int(os.environ["RANK"]) == 1
        metrics = {"extra": (logprobs.detach().sum(), "tokens")} if uneven else {}
        return Loss((Term(-logprobs.sum(), per="tokens"),), metrics)


class UnevenEvaluationTrainer(UnevenTrainer):
    """Gives a metric on the second rank only, in an evaluation."""

    in_training = False


class RewardTrainer(Trainer):
    """Three answers of the policy per prompt, with a reward for tokens below 100, in two passes
    over the rows of two steps (PPO)."""

    row_format = "demonstration"
    rollout_batches = 2
    rollout_passes = 2
    num_draws = 3

    def example(self, row: Any) -> Example:
        gold = row.columns["messages"][-1]["content"]
        return Example(row.prompt, row.answers, columns={"gold": gold})

    def rollout_shape(self, examples: Any, most: int) -> Example:
        count, blank = self.num_draws, Answer([0] * 6)
        values: dict[str, Any] = dict.fromkeys(
            ["reward", "advantage", "finished", "read"], [0.0] * count
        )
        values["logprob"] = [[0.0] * 6] * count
        return Example([0] * int(examples.prompt_lengths.max()), [blank] * count, values)

    def rewarded(self, prompt: Any, samples: Sequence[Sample]) -> Example:
        rewards = [sum(token < 100 for token in it.tokens) / len(it.tokens) for it in samples]
        mean = sum(rewards) / len(rewards)
        values = {
            "reward": rewards,
            "advantage": [reward - mean for reward in rewards],
            "finished": [float(sample.finished) for sample in samples],
        }
        return Example(prompt, [Answer(sample.tokens) for sample in samples], values)

    def logprobs(self, batch: PackedBatch) -> torch.Tensor:
        assert not self.policy.module.training
        return self.policy(batch, token_logprobs)["logprobs"]

    def answer_logprobs(self, batch: PackedBatch) -> torch.Tensor:
        return self.policy(batch, answer_logprobs)["logprobs"]

    def setup(self, run: Any) -> None:
        self.policy, self.run = run.load("policy", dropout=False), run

    def draws(self, examples: Sequence[Example], seeds: Sequence[int]) -> Mapping[str, Any]:
        count = self.num_draws
        return {
            "engine": self.policy,
            "prompts": [example.prompt for example in examples for _ in range(count)],
            "seeds": [seed + number for seed in seeds for number in range(count)],
            "max_new_tokens": 6,
        }

    def rollout(
        self, examples: Sequence[Example], step: int, seeds: Sequence[int]
    ) -> Sequence[Example]:
        count = self.num_draws
        drawn = self.run.sample(**self.draws(examples, seeds))
        assert all(isinstance(example.columns["gold"], str) for example in examples)
        made = [
            self.rewarded(example.prompt, drawn[count * place : count * (place + 1)])
            for place, example in enumerate(examples)
        ]
        logprobs = self.run.read(made, self.logprobs)
        sums = self.run.read(made, self.answer_logprobs, per="answer")
        for sample, known in zip(drawn, chain(*logprobs), strict=True):
            is_older = sample.version not in (None, step)
            assert np.allclose(sample.logprobs, known, atol=1e-4) != is_older
        return [
            attrs.evolve(example, values={**example.values, "logprob": each, "read": of_answers})
            for example, each, of_answers in zip(made, logprobs, sums, strict=True)
        ]

    def loss(self, batch: PackedBatch) -> Loss:
        logprobs = self.policy(batch, token_logprobs)["logprobs"]
        ratios = (logprobs - batch.values["logprob"][batch.predict_at]).exp()
        advantages = batch.values["advantage"][batch.answer]
        gains = torch.minimum(ratios * advantages, ratios.clamp(0.8, 1.2) * advantages)
        metrics = {
            "reward": (batch.values["reward"].sum(), "answers"),
            "finished": (batch.values["finished"].sum(), "answers"),
            "read": (batch.values["read"].sum(), "tokens"),
            "logprob": (batch.values["logprob"][batch.predict_at].sum(), "tokens"),
            "ratio": (ratios.detach().sum(), "tokens"),
            "clip": 0.2,
        }
        return Loss((Term(-gains.sum(), per="tokens"),), metrics)
