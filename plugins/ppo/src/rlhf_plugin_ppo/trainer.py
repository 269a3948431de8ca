"""Proximal policy optimisation (arXiv 1707.06347) with a critic, as in InstructGPT (arXiv
2203.02155).

Departures: averages are over the tokens of the whole optimizer step and all ranks, and advantages
are whitened over the whole rollout, never over micro-batches; policy and critic are two models
with an optimizer each; an answer without a score is trained on by neither; KL, with or without an
adapted coefficient, is in the reward only.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import attrs
import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from rlhf.engine import Engine
from rlhf.errors import RLHFError
from rlhf.trainer import Classifier, Example, Loss, PackedBatch, Run, Term
from rlhf_plugin_ppo import metrics
from rlhf_plugin_ppo.advantages import Matrix, adapted, matrix_of
from rlhf_plugin_ppo.answers import OF_TOKENS, blank_tree, estimates, held_out_trees, trees
from rlhf_plugin_ppo.config import PPOConfig
from rlhf_plugin_ppo.losses import token_values, value_loss
from rlhf_rollouts.judged import Judged
from rlhf_rollouts.metrics import of_clipping, of_sampling
from rlhf_rollouts.on_policy import OnPolicyTrainer
from rlhf_rollouts.ratios import clipped_gains, corrections
from rlhf_rollouts.written import plain_trees


class PPOTrainer(OnPolicyTrainer):
    section = "ppo"
    config: PPOConfig

    def __init__(self, config: PPOConfig, tokenizer: Any) -> None:
        super().__init__(config, tokenizer)
        self.beta = config.kl.beta
        """The coefficient of KL in the next rollout."""
        self.first_step = config.critic.warmup

    def classifiers(self, config: Any) -> list[Classifier]:
        if self.config.critic.model is not None:
            return []
        another = "set ppo.critic.model to a reward model with the same tokenizer"
        return [Classifier(task="token", labels=1, otherwise=another)]

    def setup(self, run: Run) -> None:
        super().setup(run)
        self.critic = load_critic(run, self.config)
        self.check_router(self.critic)
        self.reference = None
        if self.config.kl.beta:
            self.reference = run.reference(self.config.kl.reference, live=True)

    def blank_tree(self, prompts: NDArray[Any], most: int) -> Example:
        return blank_tree(self.config, prompts, self.names, most=most)

    def held_out(self, examples: Sequence[Example], judged: Judged) -> list[Example]:
        return held_out_trees(examples, judged)

    def trained(self, examples: Sequence[Example], judged: Judged, step: int) -> list[Example]:
        config = self.config
        self.check_scored(judged, step)
        scored = ~np.isnan(judged.total).reshape(-1)
        plain = plain_trees(examples, judged.groups)
        logprobs = self.run.read(plain, self.logprobs)
        self.compare(judged, logprobs, step)
        old = matrix_of(logprobs)
        values = self.read(plain, self.critic, token_values, "values")
        log_ratios = 0 * old
        if self.reference is not None:
            log_ratios = old - self.read(plain, self.reference, self.readout, "logprobs")
        known = estimates(judged, values, log_ratios, config, self.beta)
        if step < config.critic.warmup:
            known["advantages"] = 0 * known["advantages"]
        kl = np.nansum(log_ratios, axis=1)
        self.adapt(float(kl[scored].mean()), answers=scored.size)
        return trees(examples, judged, {"old": old, "values": values, **known}, kl)

    def read(self, plain: Sequence[Example], model: Any, readout: Any, name: str) -> Matrix:
        """Return what a model computes for each token of the answers [answers, T]. Collective."""
        return matrix_of(self.run.read(plain, lambda batch: model(batch, readout)[name]))

    def adapt(self, kl: float, *, answers: int) -> None:
        """Change the coefficient of KL after a rollout with this divergence per answer."""
        settings = self.config.kl
        if settings.target is not None:
            self.beta = adapted(
                self.beta, kl, target=settings.target, horizon=settings.horizon, answers=answers
            )

    def loss(self, batch: PackedBatch) -> Loss:
        config, clip = self.config, self.config.clip
        read = self.policy(batch, self.readout)
        values = self.critic(batch, token_values)["values"]
        drawn, old, before, advantages, returns = (
            batch.values[name][batch.predict_at] for name in OF_TOKENS
        )
        ratio = (read["logprobs"] - old).exp()
        gains = clipped_gains(ratio, advantages, low=clip.low, high=clip.high, dual=clip.dual)
        weights = corrections(old, drawn, config.correction, batch.answer, batch.num_answers)
        losses = -gains * weights
        errors, clipped = value_loss(values, before, returns, clip.value)
        terms = (
            Term(losses.sum(), per="tokens"),
            Term(errors.sum(), per="tokens", role="critic"),
        )
        found = self.rollout_metrics(batch)
        if self.policy.module.training:
            below = (ratio < 1 - clip.low) & (advantages < 0)
            above = (ratio > 1 + clip.high) & (advantages > 0)
            found |= of_clipping(below, above)
            found |= of_sampling(old, drawn, batch, config.correction.level)
            found |= metrics.of_critic(errors, clipped, before, returns)
            found["policy_loss"] = (losses.sum(), "tokens")
            found["entropy"] = (read["entropy"].sum(), "tokens")
            if self.reference is not None:
                found |= self.metrics_of_kl(batch.values["kl"])
        return Loss(terms, found)

    def metrics_of_kl(self, kl: Tensor) -> dict[str, Any]:
        """Return the divergence from the reference per token and per answer, and its
        coefficient."""
        return {
            "kl": (kl.sum(), "tokens"), "objective/kl": (kl.sum(), "scored"), "kl_coef": self.beta
        }  # fmt: skip

    def derive(self, sums: Mapping[str, Any]) -> Mapping[str, float]:
        return {**super().derive(sums), **metrics.explained_variance(sums)}

    def state(self) -> dict[str, Any]:
        return super().state() | {"kl_coef": self.beta}

    def load_state(self, state: Mapping[str, Any]) -> None:
        super().load_state(state)
        self.beta = state["kl_coef"]


def load_critic(run: Run, config: PPOConfig) -> Engine:
    """Return the critic: the policy's model with a new head, or another one, whose head is kept if
    it has one. Raises RLHFError for a model with another tokenizer. Collective."""
    own = config.critic
    lora = own.lora and run.config.lora is not None
    # What the settings of the model freeze and continue is the policy's.
    model = attrs.evolve(run.config.model, adapter=None, freeze=())
    if not lora:
        model = attrs.evolve(model, quantize=None)
    if own.model is not None:
        model = attrs.evolve(
            model, path=own.model, revision=None, tokenizer=None, part="whole", init="pretrained"
        )
        if run.load_tokenizer(model).get_vocab() != run.tokenizer.get_vocab():
            raise RLHFError(
                f"ppo.critic.model {own.model} has another tokenizer than the policy; choose a "
                "model with the same one"
            )
    names = getattr(run.load_architecture("critic", model=model), "architectures", None) or [""]
    scores = own.model is not None and names[0].endswith("ForSequenceClassification")
    return run.load(
        "critic", model=model, lora=lora, task="sequence" if scores else "token", labels=1,
        dropout=False, optim=own.optim.over(run.config.optim),
    )  # fmt: skip
