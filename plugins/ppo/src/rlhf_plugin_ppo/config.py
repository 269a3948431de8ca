"""The section `ppo`."""

from math import ceil
from typing import Any, Literal

import attrs
from attrs import field, frozen, validators

from rlhf.plugin import (
    Config,
    OptimConfig,
    RLHFError,
    check_model_folder,
    check_reference,
    check_rules,
)
from rlhf_rollouts.settings import OnPolicyConfig, check_on_policy

positive: Any = validators.gt(0)
not_negative: Any = validators.ge(0)
below_one: Any = [positive, validators.lt(1)]
optional: Any = validators.optional
HORIZON = 10000


@frozen(kw_only=True)
class Clip:
    """How far policy and critic may move within the updates of a rollout."""

    low: float = field(default=0.2, validator=below_one)
    """The ratio of probabilities counts as at least 1 - low (arXiv 1707.06347 eq. 7)."""
    high: float = field(default=0.2, validator=positive)
    """The ratio counts as at most 1 + high."""
    dual: float | None = field(default=None, validator=optional(validators.gt(1)))
    """For a negative advantage the ratio counts as at most this number (arXiv 1912.09729)."""
    value: float | None = field(default=0.2, validator=optional(positive))
    """The critic's loss is the larger one of its value and of its value at most this far from that
    before the updates; null: it is not clipped."""


@frozen(kw_only=True)
class KL:
    """The penalty on the distance from the policy before training, in the reward of each token."""

    beta: float = field(default=0.01, validator=not_negative)
    """Coefficient of the log-ratio to the reference; with 0 no reference is loaded."""
    target: float | None = field(default=None, validator=optional(positive))
    """Divergence per answer, in nats, to which the coefficient is adapted after each rollout (arXiv
    1909.08593 section 2.2); null: it stays beta."""
    horizon: int = field(default=HORIZON, validator=positive)
    """With a target, answers over which the coefficient changes by a fifth at most."""
    reference: Literal["auto", "adapter", "engine"] = "auto"
    """adapter: the policy with its adapter off. engine: a frozen second model. auto: the adapter
    that is off, if there is one."""


@frozen(kw_only=True)
class CriticOptim:
    """The critic's optimizer. What is null is as in the section `optim`."""

    lr: float = field(default=1e-5, validator=positive)
    """Peak learning rate (9e-6 in OpenRLHF)."""
    schedule: Literal["constant", "linear", "cosine"] | None = None
    """Learning rate after warm-up."""
    warmup: float | None = field(default=None, validator=optional(not_negative))
    """Linear warm-up: a share of all steps if below 1, else a number of steps."""
    weight_decay: float | None = field(default=None, validator=optional(not_negative))
    """Decoupled weight decay."""
    clip: float | None = field(default=None, validator=optional(not_negative))
    """Gradient norm above which gradients are scaled down; 0 disables clipping."""

    def over(self, optim: OptimConfig) -> OptimConfig:
        """Return the settings of the run's `optim` with those that are set here."""
        own = attrs.asdict(self)
        return attrs.evolve(optim, **{name: own[name] for name in own if own[name] is not None})


@frozen(kw_only=True)
class Critic:
    """The model that predicts the return at each token."""

    model: str | None = None
    """Folder of a reward model, whose head is kept, or of another model with the policy's
    tokenizer; null: the policy's own model before training, with a new head."""
    lora: bool = True
    """In a run with lora the critic has an adapter of its own; false: all of its weights are
    trained."""
    warmup: int = field(default=0, validator=not_negative)
    """Steps at the start in which only the critic is trained, a multiple of those that a rollout
    serves."""
    optim: CriticOptim = field(factory=CriticOptim)
    """Its optimizer."""


@frozen(kw_only=True)
class PPOConfig(OnPolicyConfig):
    """Proximal policy optimisation with a critic."""

    answers: int = field(default=1, validator=positive)
    """Answers to each prompt."""
    gamma: float = field(default=1.0, validator=[positive, validators.le(1)])
    """Discount of the return by each token (arXiv 1506.02438)."""
    lambda_: float = field(default=0.95, validator=[not_negative, validators.le(1)])
    """Of generalised advantage estimation: 1 is the return minus the critic's value, 0 the error of
    one token (arXiv 1506.02438 eq. 16)."""
    reward_clip: float | None = field(default=None, validator=optional(positive))
    """Bound of the absolute reward of an answer, before penalties; null: none."""
    missing_eos_penalty: float = field(default=0.0, validator=not_negative)
    """Subtracted from the reward of an answer that is cut at max_new_tokens."""
    whiten_rewards: bool = False
    """Divide the rewards of the tokens, with the KL penalty, by their standard deviation over the
    rollout."""
    whiten_advantages: bool = True
    """Subtract the mean of the advantages over the rollout, and divide by their standard
    deviation."""
    clip: Clip = field(factory=Clip)
    """How far policy and critic may move within the updates of a rollout."""
    kl: KL = field(factory=KL)
    """The penalty on the distance from the policy before training."""
    critic: Critic = field(factory=Critic)
    """The model that predicts the return at each token."""
    batches: int = field(default=4, validator=positive)
    """How many steps' prompts are answered at once."""

    def __attrs_post_init__(self) -> None:
        super().__attrs_post_init__()
        kl, warmup, serves = self.kl, self.critic.warmup, self.batches * self.passes
        check_rules(
            ("kl.target needs kl.beta above 0, from which it starts", kl.target and not kl.beta),
            (
                "kl.horizon has no effect without kl.target",
                kl.target is None and kl.horizon != HORIZON,
            ),
            (
                "kl.reference has no effect with kl.beta 0",
                not kl.beta and kl.reference != "auto",
            ),
            (
                f"critic.warmup {warmup} is not a multiple of the {serves} steps that a rollout "
                f"serves (batches times passes); set it to {ceil(warmup / serves) * serves}",
                warmup % serves,
            ),
        )


def check(config: Config) -> None:
    """Raise RLHFError without rewards, and for models or coefficients that this run cannot have."""
    section: PPOConfig = config.own
    check_on_policy(config, "ppo")
    if section.critic.model is not None:
        check_model_folder(section.critic.model, "ppo.critic.model")
    elif config.model.adapter is not None:
        raise RLHFError(
            "ppo: the critic would start without model.adapter, with all of its weights trained; "
            "merge the adapter first with `rlhf merge` and set lora, or set ppo.critic.model"
        )
    if section.kl.beta:
        check_reference(config, section.kl.reference, live=True)
    answers = config.batch.size * section.batches * section.answers
    if section.kl.target and answers >= 5 * section.kl.horizon:
        raise RLHFError(
            f"ppo.kl.horizon {section.kl.horizon} is too small for rollouts of {answers} answers, "
            f"after which the coefficient could be 0; raise it above {answers // 5}"
        )
