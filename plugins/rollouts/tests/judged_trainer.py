"""A trainer that scores texts with a reward model in its rollout."""

import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from rlhf.readouts import summed_logprobs
from rlhf.trainer import Example, Loss, PackedBatch, Row, Run, Term, Trainer
from rlhf_rollouts.reward_models import RewardModels
from rlhf_rollouts.rewards import RewardSpec

PROMPTS = ("How much is 2 + 3?", "How much is 2 + 3?", "How much is 4 + 5?")
COMPLETIONS = ("The answer is 5.", "6", "The answer is 9.")
SOURCES = ("chat", "code", "chat")


class Judged(Trainer):
    row_format = "demonstration"

    def example(self, row: Row) -> Example:
        return Example(row.prompt, row.answers)

    def setup(self, run: Run) -> None:
        model = os.environ["REWARD_MODEL"]
        specs = [
            RewardSpec(model=model),
            RewardSpec(function="number"),
            RewardSpec(model=model, name="of_chats", when={"source": "chat"}),
            RewardSpec(model=model, name="of_none", when={"source": "math"}),
        ]
        self.policy = run.load("policy")
        self.models = RewardModels(run, specs)

    def rollout(
        self, examples: Sequence[Example], step: int, seeds: Sequence[int]
    ) -> Sequence[Example]:
        scored = self.models(PROMPTS, COMPLETIONS, columns={"source": SOURCES})
        np.savez(Path(os.environ["SCORES"]), prompts=PROMPTS, completions=COMPLETIONS, **scored)
        return examples

    def loss(self, batch: PackedBatch) -> Loss:
        return Loss((Term(-self.policy(batch, summed_logprobs)["sum"], per="tokens"),))
