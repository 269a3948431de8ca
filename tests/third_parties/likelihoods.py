"""Distillation from a teacher with another tokenizer: the student's log-likelihood of each answer
approaches the teacher's, per character. ALM (arXiv 2503.20083) compares parts of answers so."""

from collections.abc import Sequence
from typing import Any

import attrs
from torch import Tensor

from rlhf.plugin import ModelConfig
from rlhf.readouts import answer_logprobs
from rlhf.trainer import Example, Loss, PackedBatch, Row, Run, Term, Trainer
from rlhf_rows import encode


@attrs.frozen(kw_only=True)
class LikelihoodsConfig:
    """The teacher."""

    teacher: str = ""
    """Its folder or hub name."""


class Likelihoods(Trainer):
    row_format = "demonstration"
    config: LikelihoodsConfig

    def example(self, row: Row) -> Example:
        return Example(row.prompt, row.answers, columns={"messages": row.columns["messages"]})

    def setup(self, run: Run) -> None:
        self.run = run
        self.policy = run.load("policy")
        model = ModelConfig(path=self.config.teacher, dtype=run.config.model.dtype)
        self.teacher = run.load("teacher", model=model, trained=False)
        self.their_tokenizer = run.load_tokenizer(model)

    def rollout(self, examples: Sequence[Example], step: int, seeds: Any) -> list[Example]:
        """Have the teacher read the answers in its own tokens and chat template."""
        rows, sizes = [], []
        for messages in (example.columns["messages"] for example in examples):
            start = [each["role"] for each in messages].index("assistant")
            rows.append(encode(self.their_tokenizer, messages[:start], messages[start:]))
            turns = (each["content"] for each in messages if each["role"] == "assistant")
            sizes.append(sum(map(len, turns)))
        theirs = [Example(row.prompt, row.answers) for row in rows]
        logprobs = self.run.read(theirs, self.read_teacher, per="answer")
        found = zip(examples, logprobs, sizes, strict=True)
        return [attrs.evolve(e, values={"teacher": values, "size": [n]}) for e, values, n in found]

    def read_teacher(self, batch: PackedBatch) -> Tensor:
        return self.teacher(batch, answer_logprobs)["logprobs"]

    def rollout_shape(self, examples: Sequence[Example], most: int) -> Example:
        shape = super().rollout_shape(examples, most)
        return attrs.evolve(shape, values={"teacher": [0.0], "size": [1.0]})

    def loss(self, batch: PackedBatch) -> Loss:
        own, known = self.policy(batch, answer_logprobs)["logprobs"], batch.values["teacher"]
        gaps = (own - known) / batch.values["size"]
        metrics = {"teacher": (known.sum(), "answers"), "student": (own.detach().sum(), "answers")}
        return Loss((Term(gaps.square().sum(), per="answers"),), metrics)
