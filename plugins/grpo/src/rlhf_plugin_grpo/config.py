"""The section `grpo`."""

from typing import Any, Literal

import attrs
from attrs import field, frozen, validators

from rlhf.plugin import Config, check_reference, check_rules
from rlhf_plugin_grpo.presets import (
    PRESETS,
    Advantage,
    Aggregation,
    ClipKind,
    Filter,
    Method,
    Per,
    Place,
    Ratio,
    Scale,
    Truncated,
)
from rlhf_rollouts.settings import OnPolicyConfig, check_on_policy

positive: Any = validators.gt(0)
not_negative: Any = validators.ge(0)
optional = validators.optional


def _names_function(instance: Any, attribute: Any, value: str | None) -> None:
    if value is not None and not all(value.partition(":")[::2]):
        raise ValueError(f"{value!r} does not name a function; write module:function")


@frozen(kw_only=True)
class Clip:
    """How far the policy may move within the updates of a rollout."""

    kind: ClipKind | None = None
    """ppo: the smaller of the ratio's and the clipped ratio's gain (arXiv 1707.06347 eq. 7). cispo:
    the ratio, at most 1 + high, as a constant weight on the log-probability (arXiv 2506.13585), so
    that every token keeps a gradient. none: the ratio as it is. Default: that of the preset."""
    low: float | None = field(
        default=None, validator=optional(validators.and_(positive, validators.lt(1)))
    )
    """ppo: the ratio counts as at least 1 - low."""
    high: float | None = field(default=None, validator=optional(positive))
    """The ratio counts as at most 1 + high."""
    dual: float | None = field(default=None, validator=optional(validators.gt(1)))
    """ppo: for a negative advantage the ratio counts as at most this number (arXiv 1912.09729)."""


@frozen(kw_only=True)
class KL:
    """The penalty on the distance from the policy before training."""

    beta: float | None = field(default=None, validator=optional(not_negative))
    """Its coefficient; with 0 no reference is loaded. Default: that of the preset."""
    in_: Place | None = None
    """loss: added to the loss of each token. reward: subtracted from the reward of each answer, as
    a sum over its tokens. Default: that of the preset."""
    estimator: Literal["k2", "k3"] | None = None
    """In the loss, with d the log-ratio to the reference: k3, the default, is (exp(-d) - 1 + d)
    times the ratio to the policy that wrote the answers, and k2 is d^2 / 2 with that ratio as a
    weight; both have the gradient of the divergence. In the reward it is d."""
    reference: Literal["auto", "adapter", "engine"] = "auto"
    """adapter: the policy with its adapter off. engine: a frozen second model. auto: the adapter
    that is off, if there is one."""
    every: int | None = field(default=None, validator=optional(positive))
    """Steps after which the reference becomes the policy; null: it never changes."""


@frozen(kw_only=True)
class GRPOConfig(OnPolicyConfig):
    """Group relative policy optimisation and its relatives."""

    preset: Literal["dapo", "dr_grpo", "grpo", "rloo", "reinforce_pp", "gspo", "cispo"] = "dapo"
    """The method whose settings are the defaults of advantage, scale, aggregation, ratio, clip,
    per, kl, truncated and filter. The run prints which of them are changed."""
    advantage: Advantage | None = None
    """mean: the reward minus the mean of the group (arXiv 2402.03300). leave_one_out: minus the
    mean of the others (arXiv 2402.14740). none: the reward. Default: that of the preset."""
    scale: Scale | None = None
    """The standard deviation by which advantages are divided: group, that of the prompt's rewards;
    batch, that of all rewards of the rollout (arXiv 2508.08221); none. Default: that of the
    preset."""
    aggregation: Aggregation | None = None
    """How several rewards become one advantage. sum_then_normalize: that of their weighted sum.
    normalize_then_sum: the weighted sum of the advantages of each, normalised over the rollout
    (GDPO, arXiv 2601.05242). Default: that of the preset."""
    ratio: Ratio | None = None
    """Of the probabilities under the policy now and when the answers were written: token, that of
    each token; sequence, their geometric mean over the answer (arXiv 2507.18071). Default: that of
    the preset."""
    clip: Clip = field(factory=Clip)
    """How far the policy may move within the updates of a rollout."""
    per: Per | None = None
    """What the loss is averaged over. tokens: all tokens of the step. answers: the tokens of each
    answer, then the answers. constant: answers times max_new_tokens (arXiv 2503.20783). Default:
    that of the preset."""
    kl: KL = field(factory=KL)
    """The penalty on the distance from the policy before training."""
    truncated: Truncated | None = None
    """Answers that are cut at max_new_tokens. count: nothing. mask: they are not trained on. soft:
    the last fifth of max_new_tokens costs up to 1 of reward (arXiv 2503.14476 eq. 13). Default:
    that of the preset."""
    filter: Filter | None = None
    """zero_variance: groups whose rewards are all equal are not computed and do not count in the
    averages. Default: that of the preset."""
    entropy: float = field(default=0.0, validator=not_negative)
    """Factor of the mean entropy of the tokens of the step, which is added to the gain, so that the
    policy stays less certain."""
    loss: str | None = field(default=None, validator=_names_function)
    """`module:function` of your own in place of ratio and clip."""

    @property
    def method(self) -> Method:
        """The preset with the settings that are changed."""
        given: dict[str, Any] = {
            "advantage": self.advantage,
            "scale": self.scale,
            "aggregation": self.aggregation,
            "ratio": self.ratio,
            "clip_kind": self.clip.kind,
            "clip_low": self.clip.low,
            "clip_high": self.clip.high,
            "per": self.per,
            "kl_beta": self.kl.beta,
            "kl_in": self.kl.in_,
            "truncated": self.truncated,
            "filter": self.filter,
        }
        set_here = {name: value for name, value in given.items() if value is not None}
        return attrs.evolve(PRESETS[self.preset], **set_here)

    @property
    def off_policy(self) -> bool:
        """Whether a rollout serves several steps, so that the policy moves within it."""
        return self.batches * self.passes > 1

    def __attrs_post_init__(self) -> None:
        super().__attrs_post_init__()
        method, clip, kl = self.method, self.clip, self.kl
        compares = (method.advantage, method.filter, method.scale) != ("none", "none", "none")
        check_rules(
            (
                "advantage leave_one_out cannot be combined with scale group: one answer that "
                "differs from all others would get an advantage without bound; set scale to none",
                method.advantage == "leave_one_out" and method.scale == "group",
            ),
            (
                "answers 1 leaves nothing to compare; raise it, or set advantage, scale and filter "
                "to none",
                self.answers == 1 and compares,
            ),
            (
                f"advantage none cannot be combined with scale {method.scale}: rewards that are "
                "nearly equal would get advantages without bound; set scale to none",
                method.advantage == "none" and method.scale != "none" and self.answers > 1,
            ),
            (
                "aggregation normalize_then_sum cannot be combined with kl.in reward, since the "
                "penalty would lose its size; set kl.in to loss",
                method.aggregation == "normalize_then_sum"
                and method.kl_beta
                and method.kl_in == "reward",
            ),
            (
                f"clip.low and clip.dual have no effect with clip.kind {method.clip_kind}",
                method.clip_kind != "ppo" and (clip.low or clip.dual),
            ),
            (
                "clip.high has no effect with clip.kind none",
                method.clip_kind == "none" and clip.high,
            ),
            (
                "clip and ratio have no effect with a loss of your own",
                self.loss and (clip != Clip() or self.ratio),
            ),
            (
                "kl.in, kl.estimator, kl.reference and kl.every have no effect with kl.beta 0",
                method.kl_beta == 0 and kl != KL(beta=kl.beta),
            ),
            (
                f"kl.estimator {kl.estimator} is for the loss; in the reward the penalty is the "
                "log-ratio itself, so remove it",
                method.kl_in == "reward" and kl.estimator,
            ),
        )


def check(config: Config) -> None:
    """Raise RLHFError without rewards, and for a reference that this run cannot have."""
    section: GRPOConfig = config.own
    check_on_policy(config, "grpo")
    if section.method.kl_beta:
        check_reference(config, section.kl.reference, every=section.kl.every, live=True)
