"""Process reward models: the probability that each step of a solution is right.

Cross entropy at the last token of every step, as in "Let's Verify Step by Step" (arXiv 2305.20050)
and Math-Shepherd (arXiv 2312.08935). Departures from common practice: soft labels stay soft, and
the mean is over all labelled steps of the optimizer step on all ranks.
"""

import math
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from rlhf.errors import RLHFError
from rlhf.readouts import token_scores
from rlhf.trainer import Classifier, Example, Loss, PackedBatch, Run, Term, Trainer
from rlhf_plugin_prm.config import NEGATIVE, POSITIVE
from rlhf_plugin_prm.losses import log_odds, step_loss
from rlhf_plugin_prm.measures import derived, step_sums
from rlhf_plugin_prm.scorer import Scorer
from rlhf_plugin_prm.stepwise import label_per_token


class PRMTrainer(Trainer):
    row_format = "stepwise"
    scorer = Scorer

    def __init__(self, config: Any, tokenizer: Any) -> None:
        super().__init__(config, tokenizer)
        self.read = token_scores
        if config.formulation == "token":
            right, wrong = config.reward_tokens or (POSITIVE, NEGATIVE)
            ids = [token_id(tokenizer, wrong), token_id(tokenizer, right)]
            if ids[0] == ids[1]:
                raise RLHFError(
                    f"prm.reward_tokens {right!r} and {wrong!r} are the same token {ids[0]}; "
                    "choose two that differ"
                )
            self.tokens = torch.tensor(ids)

    def example(self, row: Any) -> Example:
        if row.images:
            raise RLHFError("the row has images, which prm does not read; remove them, or the row")
        labels = label_per_token(row)
        if self.config.steps == "last":
            labelled = [place for place, label in enumerate(labels) if not math.isnan(label)]
            labels = [
                label if place in labelled[-1:] else math.nan for place, label in enumerate(labels)
            ]
        return Example(row.prompt, row.answers, {"label": [labels]})

    def classifiers(self, config: Any) -> list[Classifier]:
        if self.config.formulation == "token":
            return []
        return [Classifier(task="token", otherwise="set prm.formulation to token")]

    def setup(self, run: Run) -> None:
        if self.config.formulation == "token":
            self.policy = run.load("policy", dropout=False)
            self.read = partial(token_scores, tokens=self.tokens.to(run.device))
        else:
            self.policy = run.load("policy", task="token", dropout=False)

    def loss(self, batch: PackedBatch) -> Loss:
        odds = log_odds(self.policy(batch, self.read)["scores"])
        labels = batch.values["label"]
        known = ~labels.isnan()
        costs = step_loss(odds, labels.nan_to_num()).masked_fill(~known, 0.0)
        metrics = step_sums(odds.detach(), labels, batch.example, batch.num_examples)
        return Loss((Term(costs.sum(), per="labels"),), metrics)

    def score(self, batch: PackedBatch) -> Tensor:
        """Return the probability of each labelled step [T] to be right, nan elsewhere."""
        odds = log_odds(self.policy(batch, self.read)["scores"])
        return odds.sigmoid().masked_fill(batch.values["label"].isnan(), math.nan)

    def derive(self, sums: Mapping[str, Any]) -> Mapping[str, float]:
        return derived(sums)

    def model_config(self, metrics: Mapping[str, float]) -> Mapping[str, Any]:
        """Return how steps are marked and read; `rlhf_plugin_prm.scorer` reads it."""
        reading: dict[str, Any] = {
            "prm_formulation": self.config.formulation,
            "prm_separator": self.config.separator,
            "prm_placeholder": self.config.placeholder,
        }
        if self.config.formulation == "token":
            reading["prm_reward_tokens"] = self.tokens.tolist()
        return reading


def token_id(tokenizer: Any, text: str) -> int:
    """Return the id of the single token `text`. Raises RLHFError if it is several tokens."""
    known = tokenizer.get_vocab()
    if text in known:
        return int(known[text])
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    if len(ids) != 1:
        raise RLHFError(
            f"prm.reward_tokens: {text!r} is {len(ids)} tokens in this tokenizer ({ids}); choose a "
            "text that is one token"
        )
    return int(ids[0])
