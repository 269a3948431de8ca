"""Kahneman-Tversky optimisation: answers that are good or bad by themselves (arXiv 2402.01306).

Departures from the paper and from common practice: the divergence is estimated from prompts with
answers of other rows. They are drawn from the whole data set, not from the neighbours in a batch:
once if the reference is cached, else in each epoch. The divergence is the mean over the optimizer
step on all ranks, so the curve does not depend on how a step is split, and a step of one row has a
divergence too.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from torch import Tensor

from rlhf.errors import RLHFError
from rlhf.readouts import answer_logprobs
from rlhf.trainer import (
    Example,
    Examples,
    Loss,
    Packable,
    PackedBatch,
    Run,
    Term,
    Trainer,
)
from rlhf_plugin_kto.losses import balance_advice, divergence, kto
from rlhf_plugin_kto.mismatch import Mismatched, partners

SIDES = ("chosen", "rejected")
"""Names of desirable and undesirable rows in metrics, as in TRL."""


class KTOTrainer(Trainer):
    row_format = "unpaired"

    def example(self, row: Any) -> Example:
        return Example(row.prompt, row.answers, {"desirable": float(row.columns["label"])})

    def setup(self, run: Run) -> None:
        self.policy = run.load("policy", dropout=False)
        survey = self.survey_examples if self.needs_survey() else None
        self.reference = run.reference(self.config.reference, survey=survey)

    def needs_survey(self) -> bool:
        return self.config.loss == "kto"

    def survey_examples(self, examples: Examples, draw: np.random.Generator) -> Packable:
        return Mismatched(examples, draw)

    def survey(self, batch: PackedBatch) -> Mapping[str, Tensor]:
        policy = self.policy(batch, answer_logprobs)["logprobs"]
        return {"kl": policy - self.reference.answer_logprobs(batch)}

    def loss(self, batch: PackedBatch) -> Loss:
        config, desirable = self.config, batch.values["desirable"]
        logprobs = self.policy(batch, answer_logprobs)["logprobs"]
        logratios = logprobs - self.reference.answer_logprobs(batch)
        kl = divergence(batch.step["kl"]) if self.needs_survey() else logprobs.new_zeros(())
        losses = kto(
            logratios,
            desirable,
            kl,
            beta=config.beta,
            desirable_weight=config.desirable_weight,
            undesirable_weight=config.undesirable_weight,
        )
        right = (2 * desirable - 1) * (logratios.detach() - kl) > 0
        metrics = {"rewards/accuracies": (right.sum(), "examples")}
        if self.needs_survey():
            metrics["kl"] = (kl * batch.num_examples, "examples")
        for side, share in zip(SIDES, (desirable, 1 - desirable), strict=True):
            metrics[f"rewards/{side}"] = ((config.beta * logratios.detach() * share).sum(), "")
            metrics[f"logps/{side}"] = ((logprobs.detach() * share).sum(), "")
            metrics[f"count/{side}"] = (share.sum(), "")
        return Loss((Term(losses.sum(), per="examples"),), metrics)

    def derive(self, sums: Mapping[str, Any]) -> Mapping[str, float]:
        """Return means over the rows of each side; a side without rows has none."""
        metrics = {}
        for side in SIDES:
            metrics[f"count/{side}"] = count = sums[f"count/{side}"]
            if count:
                metrics[f"rewards/{side}"] = sums[f"rewards/{side}"] / count
                metrics[f"logps/{side}"] = sums[f"logps/{side}"] / count
        if all(f"rewards/{side}" in metrics for side in SIDES):
            metrics["rewards/margins"] = metrics["rewards/chosen"] - metrics["rewards/rejected"]
        return metrics

    def check_examples(self, examples: Examples) -> None:
        if self.needs_survey():
            # An error if one row has more than half of the examples, whatever the draw.
            partners(examples.sources, np.random.default_rng(0))
            if any(file.has_input("segment_rows") for file in examples.files):
                raise RLHFError(
                    "a completion has an image, which the mismatched pairs of kto.loss kto cannot "
                    "have; move it to the prompt, or set kto.loss to apo_zero_unpaired"
                )

    def remarks(self, examples: Examples) -> Sequence[str]:
        config, num_desirable = self.config, int(examples.value("desirable").sum())
        advice = balance_advice(
            num_desirable,
            len(examples) - num_desirable,
            config.desirable_weight,
            config.undesirable_weight,
        )
        return [f"warning    {advice}"] if advice else []
