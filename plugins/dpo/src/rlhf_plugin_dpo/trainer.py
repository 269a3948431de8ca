"""Direct preference optimisation (arXiv 2305.18290) and the losses that followed it.

Departures: the mean over pairs is that of the whole optimizer step; the negative log-likelihood
next to a pair loss is a mean over the chosen tokens of the step, not over pairs; BCO's reward shift
is the mean over the pairs of the step, not a running mean, so it depends neither on the split nor
on earlier steps; of more than two ranked answers the best is compared with the worst.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from rlhf.errors import counted
from rlhf.readouts import answer_logprobs
from rlhf.trainer import (
    Answer,
    Example,
    Examples,
    Loss,
    PackedBatch,
    Run,
    Term,
    Trainer,
    load_user_object,
)
from rlhf_plugin_dpo.config import kind_of
from rlhf_plugin_dpo.losses import LOSSES, compared

LABELS = "labels     tokens of the chosen answers, over which `sft` of dpo.loss is averaged"


class DPOTrainer(Trainer):
    row_format = "preference"

    def __init__(self, config: Any, tokenizer: Any) -> None:
        super().__init__(config, tokenizer)
        self.pair_losses = [
            (entry, kind_of(entry.name), LOSSES.get(entry.name) or load_user_object(entry.name))
            for entry in config.loss
            if entry.name != "sft"
        ]
        self.reference: Any = None

    def example(self, row: Any) -> Example:
        return pair(row, likelihood=self.config.sft_weight > 0)

    def setup(self, run: Run) -> None:
        self.policy = run.load("policy", dropout=False)
        if self.config.needs_reference:
            self.reference = run.reference(
                self.config.reference,
                every=self.config.reference_every,
                mix=self.config.reference_mix,
            )

    def needs_survey(self) -> bool:
        return any(kind.centred for _, kind, _ in self.pair_losses)

    def survey(self, batch: PackedBatch) -> Mapping[str, Tensor]:
        logprobs = self.policy(batch, answer_logprobs)["logprobs"]
        return {"log_ratio": logprobs - self.reference_logprobs(batch, logprobs)}

    def loss(self, batch: PackedBatch) -> Loss:
        policy = self.policy(batch, answer_logprobs)
        logprobs = policy["logprobs"]
        reference = self.reference_logprobs(batch, logprobs)
        terms = []
        for entry, kind, pair_loss in self.pair_losses:
            chosen, rejected = compared(kind, logprobs, reference, batch)
            terms.append(
                Term(pair_loss(chosen, rejected, self.config).sum(), "examples", entry.weight)
            )
        metrics = self.metrics(logprobs.detach(), reference, batch)
        metrics["entropy"] = (policy["tokens/entropy"].sum(), "tokens")
        if self.config.sft_weight:
            is_chosen = batch.answer % 2 == 0
            likelihood = -(policy["tokens/logprobs"] * is_chosen).sum()
            terms.append(Term(likelihood, "labels", self.config.sft_weight))
            metrics["nll_loss"] = (likelihood.detach(), "labels")
        return Loss(tuple(terms), metrics)

    def reference_logprobs(self, batch: PackedBatch, like: Tensor) -> Tensor:
        """Return the reference's log-probability of each answer [A]; 0 without a reference."""
        return self.reference.answer_logprobs(batch) if self.reference else torch.zeros_like(like)

    def metrics(
        self, logprobs: Tensor, reference: Tensor, batch: PackedBatch
    ) -> dict[str, tuple[Tensor, str]]:
        """Return metrics by TRL's names; a reward is beta times what the first loss compares."""
        kind = self.pair_losses[0][1]
        chosen, rejected = compared(kind, logprobs, reference, batch)
        margins = self.config.beta * (chosen - rejected)
        sums = {
            "rewards/chosen": self.config.beta * chosen,
            "rewards/rejected": self.config.beta * rejected,
            "rewards/accuracies": (margins > 0).float(),
            "rewards/margins": margins,
            "logps/chosen": logprobs[0::2],
            "logps/rejected": logprobs[1::2],
        }
        return {name: (value.sum(), "examples") for name, value in sums.items()}

    def remarks(self, examples: Examples) -> Sequence[str]:
        ignored = examples.value("ignored_answers")
        num_rows, num_ignored = int((ignored > 0).sum()), int(ignored.sum())
        rows, answers = counted(num_rows, "row"), counted(num_ignored, "answer")
        line = f"pairs      best against worst in {rows} with more than two answers; "
        lines = [f"{line}{answers} between them ignored"] if num_ignored else []
        return [*lines, LABELS] if self.config.sft_weight else lines


def pair(row: Any, *, likelihood: bool) -> Example:
    """Return the row's best answer, then its worst, as a tree. The value `ignored_answers` is the
    number of those between them; with `likelihood` the value `chosen` marks the tokens of the best
    answer."""
    ranks = row.columns["ranks"]
    places = range(len(ranks))
    chosen, rejected = (row.answers[pick(places, key=ranks.__getitem__)] for pick in (min, max))
    values: dict[str, Any] = {"ignored_answers": float(len(ranks) - 2)}
    if likelihood:
        marks = [marked(chosen, bare=not len(row.prompt)), [math.nan] * len(rejected.tokens)]
        values["chosen"] = marks
    return Example(row.prompt, [chosen, rejected], values)


def marked(answer: Answer, *, bare: bool) -> list[float]:
    """Return 1 for each token of the answer that is predicted, else nan, so that core counts them
    as `labels`. Without a prompt (`bare`) nothing predicts the first token."""
    trained = [True] * len(answer.tokens) if answer.trained is None else list(answer.trained)
    trained[0] = trained[0] and not bare
    return [1.0 if predicted else math.nan for predicted in trained]
