"""Group relative policy optimisation (arXiv 2402.03300) and the methods that followed it.

Departures: averages are over the whole optimizer step and all ranks, not over micro-batches; a
group is never divided over steps; groups that are filtered leave the averages and are not replaced
by others, so that a step has the prompts of its rows; an answer without a score is in no mean; KL
in the loss has the gradient of the divergence; the answers of a rollout that serves one step are
trained on with the ratio 1, without a forward for the old log-probabilities.
"""

import re
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
from torch import Tensor

from rlhf.errors import SameOnAllRanks
from rlhf.readouts import token_logprobs
from rlhf.trainer import (
    Example,
    Examples,
    Loss,
    PackedBatch,
    Run,
    Sample,
    Term,
    Trainer,
    answer_seeds,
    load_user_object,
)
from rlhf_plugin_grpo import losses, metrics
from rlhf_plugin_grpo.advantages import Rewards, alike
from rlhf_plugin_grpo.answers import Judged, blank_tree, plain_trees, stopped, trees
from rlhf_plugin_grpo.config import GRPOConfig
from rlhf_plugin_grpo.presets import PRESETS
from rlhf_rollouts.judges import Judges, kept_columns, started
from rlhf_rollouts.room import check_room

PATIENCE = 10
"""Rollouts in a row from which nothing can be learned, after which the run ends."""
LEAST_GROUPS = 32
"""Groups that count as a rollout where a collapse is looked for: a few that are alike show none."""


class GRPOTrainer(Trainer):
    row_format = "prompt"

    def __init__(self, config: GRPOConfig, tokenizer: Any) -> None:
        super().__init__(config, tokenizer)
        self.method = config.method
        self.rollout_batches, self.rollout_passes = config.batches, config.passes
        self.names = [spec.label for spec in config.rewards]
        self.own_loss = None if config.loss is None else load_user_object(config.loss)
        self.readout = partial(token_logprobs, temperature=config.temperature)
        self.first_reward: float | None = None
        """The mean reward of the first rollout."""
        self.flat = 0
        """How many groups in a row have had equal rewards, lower than the first."""
        self.useless = 0
        """How many rollouts in a row had no answer to train on."""

    def example(self, row: Any) -> Example:
        return Example(row.prompt, row.answers, columns=kept_columns(row.columns))

    def setup(self, run: Run) -> None:
        config = self.config
        self.run = run
        check_room(run, config.max_new_tokens, "grpo.max_new_tokens")
        changed = ", ".join(self.method.changed(PRESETS[config.preset]))
        run.notes.append(f"method     {config.preset}{' with ' if changed else ''}{changed}")
        options = {"deadline": config.deadline, "workers": config.workers}
        rewards = run.on_rank_zero(lambda: started(run, config.rewards, **options), share=False)
        self.policy = run.load("policy", dropout=False)
        if getattr(self.policy.module, "router_loss", 0.0):
            self.check_whole(run)
        self.judges = Judges(run, config.rewards, rewards)
        self.reference = None
        if self.method.kl_beta:
            self.reference = run.reference(config.kl.reference, every=config.kl.every, live=True)

    def check_whole(self, run: Run) -> None:
        """Raise RLHFError if a group could be divided, of which each part would have the router
        loss of a whole one."""
        budget, most = run.config.batch.budget, run.config.data.max_tokens
        trees = (self.rollout_shape(part, most) for part in run.examples)
        size = max(len(it.prompt) + sum(len(each.tokens) for each in it.answers) for it in trees)
        if size > budget:
            raise SameOnAllRanks(
                f"a group may have {size} tokens but batch.tokens is {budget}, and the router loss "
                f"of a mixture needs whole groups; set batch.tokens to at least {size}, or "
                "model.router_loss to 0"
            )

    def rollout_shape(self, examples: Examples, most: int) -> Example:
        return blank_tree(self.config, examples.prompt_lengths, most=most)

    def rollout(
        self, examples: Sequence[Example], step: int, seeds: Sequence[int]
    ) -> Sequence[Example]:
        training = self.policy.module.training
        groups = self.write(examples, seeds, training=training)
        judged = Judged.of(groups, self.judges(examples, groups, step))
        if not training:
            return trees(examples, judged, self.config, trained=False)
        plain = plain_trees(examples, groups)
        old = self.run.read(plain, self.logprobs) if self.config.off_policy else None
        log_ratios = None
        if self.reference is not None and self.method.kl_in == "reward":
            log_ratios = summed(self.run.read(plain, self.log_ratios))
        self.check(judged, step)
        return trees(examples, judged, self.config, old=old, log_ratios=log_ratios)

    def write(
        self, examples: Sequence[Example], seeds: Sequence[int], *, training: bool
    ) -> list[list[Sample]]:
        """Return the answers of the policy to each prompt."""
        config = self.config
        count = config.answers if training else config.eval.answers
        drawn = self.run.sample(
            self.policy,
            [example.prompt for example in examples for _ in range(count)],
            seeds=answer_seeds(seeds, count),
            max_new_tokens=config.max_new_tokens,
            temperature=config.temperature if training else config.eval.temperature,
        )
        if config.stop is not None:
            pattern = re.compile(config.stop)
            drawn = [stopped(sample, pattern, self.tokenizer) for sample in drawn]
        return [drawn[start : start + count] for start in range(0, len(drawn), count)]

    def logprobs(self, batch: PackedBatch) -> Tensor:
        """Return the log-probability of each prediction under the policy [N]."""
        return self.policy(batch, self.readout)["logprobs"]

    def log_ratios(self, batch: PackedBatch) -> Tensor:
        """Return the log-ratio of the policy to the reference of each prediction [N]."""
        assert self.reference is not None
        return self.logprobs(batch) - self.reference(batch, self.readout)["logprobs"]

    def check(self, judged: Judged, step: int) -> None:
        """Note what the first rollout shows. Raises RLHFError if nothing can be learned from it or
        from many in a row, or if the policy has collapsed."""
        config, scored = self.config, ~np.isnan(judged.total)
        problem = ""
        if not scored.any():
            problem = f"no reward has scored any of the {scored.size} answers; check grpo.rewards"
        elif self.method.truncated == "mask" and not judged.finished.any():
            problem = (
                f"all {scored.size} answers were cut at grpo.max_new_tokens "
                f"{config.max_new_tokens}, and none is trained on; raise it"
            )
        self.useless = self.useless + 1 if problem else 0
        if problem:
            if self.first_reward is None or self.useless == PATIENCE:
                raise SameOnAllRanks(f"step {step + 1}: {problem}")
            return
        same, mean = alike(judged.total), float(np.nanmean(judged.total))
        if self.first_reward is None:
            self.first_reward = mean
            self.run.notes.append(groups_line(same, mean))
        self.flat = self.flat + len(same) if same.all() and mean < self.first_reward else 0
        if self.flat >= PATIENCE * max(len(same), LEAST_GROUPS):
            raise SameOnAllRanks(
                f"step {step + 1}: the answers to each of the last {self.flat} prompts had the "
                f"same reward, now {mean:.3g} on average and {self.first_reward:.3g} at the "
                "start: the policy has collapsed; lower optim.lr, or set grpo.kl.beta"
            )

    def loss(self, batch: PackedBatch) -> Loss:
        method, config, values = self.method, self.config, batch.values
        read = self.policy(batch, self.readout)
        logprobs = read["logprobs"]
        drawn, gains = values["drawn"][batch.predict_at], values["advantage"][batch.answer]
        old = values["old"][batch.predict_at] if "old" in values else logprobs.detach()
        ratio = losses.ratios(logprobs, old, batch.answer, batch.num_answers, of=method.ratio)
        if self.own_loss is None:
            per_token = losses.surrogate(ratio, logprobs, gains, method, config.clip)
        else:
            per_token = self.own_loss(
                logprobs, old=old, drawn=drawn, advantages=gains, answer=batch.answer
            )
        per_token = per_token * losses.corrections(
            old, drawn, config.correction.kind, low=config.correction.low,
            high=config.correction.high,
        )  # fmt: skip
        found = metrics.of_answers(batch, self.names)
        if self.policy.module.training:
            found |= metrics.of_tokens(ratio.detach(), gains, old, drawn, method)
            found["entropy"] = (read["entropy"].sum(), "tokens")
        if self.reference is not None and method.kl_in == "loss":
            reference = self.reference(batch, self.readout)["logprobs"]
            kl = losses.divergence(logprobs, old, reference, config.kl.estimator or "k3")
            per_token = per_token + method.kl_beta * kl
            if self.policy.module.training:
                found["kl"] = (kl.sum(), "tokens")
        return Loss((self.term(per_token, batch),), found)

    def term(self, per_token: Tensor, batch: PackedBatch) -> Term:
        """Return the term of the loss of the predictions [N]."""
        if self.method.per == "tokens":
            return Term(per_token.sum(), per="tokens")
        if self.method.per == "constant":
            return Term(per_token.sum() / self.config.max_new_tokens, per="kept")
        means = losses.mean_per_answer(per_token, batch.answer, batch.num_answers)
        return Term(means.sum(), per="kept")

    def derive(self, sums: Mapping[str, Any]) -> Mapping[str, float]:
        return metrics.deviations_of(sums, self.names)

    def state(self) -> dict[str, Any]:
        return {
            "first_reward": self.first_reward, "flat": self.flat, "useless": self.useless
        }  # fmt: skip

    def load_state(self, state: Mapping[str, Any]) -> None:
        self.first_reward, self.flat = state["first_reward"], state["flat"]
        self.useless = state["useless"]


def groups_line(same: Any, mean: float) -> str:
    """Return what the run prints of its first rollout."""
    count, teaching = len(same), int((~same).sum())
    line = f"groups     reward {mean:.3g}; {teaching} of {count} groups differ in their rewards"
    if 2 * teaching < count:
        line += ", the others teach nothing: raise grpo.answers, or choose other prompts"
    return line


def summed(per_token: Sequence[Sequence[Any]]) -> Rewards:
    """Return the sum over the tokens of each answer, of numbers that may be nan."""
    return np.array([[np.nansum(answer) for answer in group] for group in per_token], np.float64)
