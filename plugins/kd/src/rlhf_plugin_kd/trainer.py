"""Knowledge distillation: the student's distribution over every trained token moves to the
teacher's.

Per token and over the whole vocabulary (Hinton et al., arXiv 1503.02531), with the divergences of
GKD (arXiv 2306.13649) and DistiLLM (arXiv 2402.03898), on the rows' answers, the student's own
(GKD, algorithm 1) or the teacher's (Kim and Rush, arXiv 1606.07947).
Departures: the mean is over all trained tokens of the optimizer step, not over sequences; whose
answer is trained on is drawn for each row, not for each batch; the teacher's answers are drawn from
its distribution, not searched for by beams.
"""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from torch import Tensor

from rlhf.plugin import ModelConfig
from rlhf.trainer import Answer, Example, Examples, Loss, PackedBatch, Run, Term, Trainer
from rlhf_distill import Mixture, TopTeacher, distil, divergence, load_teacher
from rlhf_plugin_kd.answers import check_room, with_new_answers
from rlhf_plugin_kd.losses import measure


class KDTrainer(Trainer):
    row_format = "demonstration"

    def example(self, row: Any) -> Example:
        return Example(row.prompt, row.answers)

    def setup(self, run: Run) -> None:
        config = self.config
        self.run = run
        check_room(run, config)
        teacher = ModelConfig(
            path=config.teacher,
            revision=config.teacher_revision,
            dtype=run.config.model.dtype,
            trust_remote_code=run.config.model.trust_remote_code,
        )
        self.teacher = load_teacher(
            run, teacher, top=config.cache_top, temperature=config.temperature
        )
        self.policy = run.load("policy")
        self.mixture = Mixture(
            measure(config.loss, beta=config.beta, skew=config.skew),
            temperature=config.temperature,
            nll=config.sft,
        )

    def needs_rollout(self) -> bool:
        return self.config.writes

    def rollout_shape(self, examples: Examples, most: int) -> Example:
        prompt = int(examples.prompt_lengths.max())
        written = min(prompt + self.config.max_new_tokens, most)
        size = max(written, int(examples.lengths.max()))
        return Example([0] * prompt, [Answer([0] * (size - prompt))])

    def rollout(
        self, examples: Sequence[Example], step: int, seeds: Sequence[int]
    ) -> Sequence[Example]:
        assert self.teacher is not None, "refused by the configuration"
        return with_new_answers(
            self.run, self.config, examples, seeds, student=self.policy, teacher=self.teacher
        )

    def compared(self, batch: PackedBatch) -> Mapping[str, Tensor]:
        """Return the divergence from a running teacher, or from its most likely tokens."""
        if self.teacher is not None:
            return distil(self.policy, self.teacher, batch, self.mixture)
        known = TopTeacher.of(batch, self.config.cache_top)
        return self.policy(batch, partial(divergence, teacher=known, mixture=self.mixture))

    def loss(self, batch: PackedBatch) -> Loss:
        read = self.compared(batch)
        return Loss(
            terms=(Term(read["loss"], per="tokens"),),
            metrics={
                "kl": (read["kl"].sum(), "tokens"),
                "sft_loss": (-read["logprobs"].sum(), "tokens"),
                "entropy": (read["entropy"].sum(), "tokens"),
                "mean_token_accuracy": (read["correct"].sum(), "tokens"),
                "agreement": (read["agreement"].sum(), "tokens"),
            },
        )
