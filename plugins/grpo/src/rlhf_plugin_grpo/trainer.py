"""Group relative policy optimisation (arXiv 2402.03300) and the methods that followed it.

Departures: averages are over the whole optimizer step and all ranks, not over micro-batches; a
group is never divided over steps; groups that are filtered leave the averages and are not replaced
by others, so that a step has the prompts of its rows; an answer without a score is in no mean; KL
in the loss has the gradient of the divergence; the answers of a rollout that serves one step are
trained on with the ratio 1, without a forward for the old log-probabilities.
"""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from rlhf.errors import SameOnAllRanks
from rlhf.readouts import token_logprobs
from rlhf.trainer import (
    Example,
    Loss,
    PackedBatch,
    Run,
    Term,
    load_user_object,
)
from rlhf_plugin_grpo import losses, metrics
from rlhf_plugin_grpo.advantages import Rewards
from rlhf_plugin_grpo.answers import blank_tree, same_rewards, trees
from rlhf_plugin_grpo.config import GRPOConfig
from rlhf_plugin_grpo.presets import PRESETS
from rlhf_rollouts.entropy import logprobs_and_entropy
from rlhf_rollouts.judged import Judged
from rlhf_rollouts.metrics import of_sampling
from rlhf_rollouts.on_policy import OnPolicyTrainer
from rlhf_rollouts.ratios import corrections
from rlhf_rollouts.written import plain_trees

PATIENCE = 10
"""Rollouts in a row from which nothing can be learned, after which the run ends."""
LEAST_GROUPS = 32
"""Groups that count as a rollout where a collapse is looked for: a few that are alike show none."""


class GRPOTrainer(OnPolicyTrainer):
    section = "grpo"
    config: GRPOConfig

    def __init__(self, config: GRPOConfig, tokenizer: Any) -> None:
        super().__init__(config, tokenizer)
        self.method = config.method
        self.own_loss = None if config.loss is None else load_user_object(config.loss)
        trained = logprobs_and_entropy if config.entropy else token_logprobs
        self.trained_readout = partial(trained, temperature=config.temperature)
        self.first_reward: float | None = None
        """The mean reward of the first rollout."""
        self.flat = 0
        """How many groups in a row have had equal rewards, lower than the first."""
        self.useless = 0
        """How many rollouts in a row had no answer to train on."""

    def setup(self, run: Run) -> None:
        changed = ", ".join(self.method.changed(PRESETS[self.config.preset]))
        run.notes.append(f"method     {self.config.preset}{' with ' if changed else ''}{changed}")
        super().setup(run)
        self.reference, kl = None, self.config.kl
        if self.method.kl_beta:
            self.reference = run.reference(kl.reference, every=kl.every, live=True)

    def blank_tree(self, prompts: NDArray[Any], most: int) -> Example:
        return blank_tree(self.config, prompts, self.names, most=most)

    def held_out(self, examples: Sequence[Example], judged: Judged) -> list[Example]:
        return trees(examples, judged, self.config, trained=False)

    def trained(self, examples: Sequence[Example], judged: Judged, step: int) -> list[Example]:
        config, old, log_ratios = self.config, None, None
        plain = plain_trees(examples, judged.groups)
        if config.off_policy or self.penalises or self.due:
            old = self.run.read(plain, self.logprobs)
            self.compare(judged, old, step)
        if self.penalises:
            assert old is not None
            log_ratios = differences(old, self.run.read(plain, self.reference_logprobs))
        self.check(judged, step)
        old = old if config.off_policy else None
        return trees(examples, judged, config, old=old, log_ratios=log_ratios)

    @property
    def penalises(self) -> bool:
        """Whether the distance from the reference is subtracted from the rewards."""
        return self.reference is not None and self.method.kl_in == "reward"

    def reference_logprobs(self, batch: PackedBatch) -> Tensor:
        """Return the log-probability of each prediction under the reference [N]."""
        assert self.reference is not None
        return self.reference(batch, self.readout)["logprobs"]

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
        same, mean = same_rewards(judged, config), float(np.nanmean(judged.total))
        if self.first_reward is None:
            self.first_reward = mean
            self.run.notes.append(groups_line(same, mean))
        self.flat = self.flat + len(same) if same.all() and mean < self.first_reward else 0
        seen = (
            f"step {step + 1}: the answers to each of the last {self.flat} prompts had the same "
            f"reward, now {mean:.3g} on average and {self.first_reward:.3g} at the start: the "
            "policy"
        )
        advice = "lower optim.lr, or set grpo.kl.beta"
        if self.flat >= PATIENCE * max(len(same), LEAST_GROUPS):
            raise SameOnAllRanks(f"{seen} has collapsed; {advice}")
        if self.flat == PATIENCE * len(same):
            self.run.notes.append(f"warning    {seen} may have collapsed; {advice}")

    def loss(self, batch: PackedBatch) -> Loss:
        method, config, values = self.method, self.config, batch.values
        read = self.policy(batch, self.trained_readout)
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
        weights = corrections(old, drawn, config.correction, batch.answer, batch.num_answers)
        per_token = per_token * weights
        found = self.rollout_metrics(batch) | metrics.of_groups(batch)
        if self.policy.module.training:
            found |= metrics.of_ratios(ratio.detach(), gains, method)
            found |= of_sampling(old, drawn, batch, config.correction.level)
            found["entropy"] = (read["entropy"].sum(), "tokens")
            if self.penalises:
                found["objective/kl"] = (values["kl"].sum(), "scored")
        if self.reference is not None and method.kl_in == "loss":
            reference = self.reference(batch, self.readout)["logprobs"]
            kl = losses.divergence(logprobs, old, reference, config.kl.estimator or "k3")
            if self.lags:
                # Its mean has the right gradient over answers that `old` has written.
                kl = kl * weights
            per_token = per_token + method.kl_beta * kl
            if self.policy.module.training:
                found["kl"] = (kl.sum(), "tokens")
        terms: tuple[Term, ...] = (self.term(per_token, batch),)
        if config.entropy:
            terms += (Term(read["entropy_sum"], per="tokens", weight=-config.entropy),)
        return Loss(terms, found)

    def term(self, per_token: Tensor, batch: PackedBatch) -> Term:
        """Return the term of the loss of the predictions [N]."""
        if self.method.per == "tokens":
            return Term(per_token.sum(), per="tokens")
        if self.method.per == "constant":
            return Term(per_token.sum() / self.config.max_new_tokens, per="kept")
        means = losses.mean_per_answer(per_token, batch.answer, batch.num_answers)
        return Term(means.sum(), per="kept")

    def state(self) -> dict[str, Any]:
        own = {"first_reward": self.first_reward, "flat": self.flat, "useless": self.useless}
        return super().state() | own

    def load_state(self, state: Mapping[str, Any]) -> None:
        super().load_state(state)
        self.first_reward, self.flat = state["first_reward"], state["flat"]
        self.useless = state["useless"]


def groups_line(same: Any, mean: float) -> str:
    """Return what the run prints of its first rollout."""
    count, teaching = len(same), int((~same).sum())
    line = f"groups     reward {mean:.3g}; {teaching} of {count} groups differ in their rewards"
    if 2 * teaching < count:
        line += ", the others teach nothing: raise grpo.answers, or choose other prompts"
    return line


def differences(old: Sequence[Sequence[Any]], reference: Sequence[Sequence[Any]]) -> Rewards:
    """Return the sum over the tokens of each answer of the differences of their log-probabilities,
    which may be nan."""
    groups = zip(old, reference, strict=True)
    sums = [[np.nansum(a - b) for a, b in zip(*group, strict=True)] for group in groups]
    return np.array(sums, np.float64)
