"""Settings that on-policy trainers share. The record of a trainer imports this module, so it loads
no torch."""

import re
from typing import Any, Literal

from attrs import field, frozen, validators

from rlhf.errors import RLHFError
from rlhf.plugin import Config, check_rules, documented
from rlhf_rollouts.rewards.spec import RewardSpec

__all__ = [
    "Correction", "Evaluation", "OnPolicyConfig", "Tools", "check_lag", "check_on_policy",
    "is_pattern",
]  # fmt: skip

positive: Any = validators.gt(0)


def is_pattern(instance: Any, attribute: Any, value: str | None) -> None:
    """Raise ValueError for a setting that is not a regular expression."""
    try:
        re.compile(value or "")
    except re.error as error:
        raise ValueError(f"{value!r} is not a regular expression: {error}") from None


def _name_objects(instance: Any, attribute: Any, value: str | tuple[str, ...] | None) -> None:
    for path in (value,) if isinstance(value, str) else value or ():
        if not all(path.rpartition(":")[::2]):
            raise ValueError(f"{path!r} names nothing; write module:name or file.py:name")


@documented
@frozen(kw_only=True)
class Tools:
    """What the policy may call while it writes an answer, which then has several turns."""

    functions: tuple[str, ...] = field(default=(), validator=_name_objects)
    """Functions that are tools, as `module:name` or `file.py:name`. Their names, docstrings and
    type hints become JSON schemas, as in transformers."""
    environment: str | None = field(default=None, validator=_name_objects)
    """A class as for `environment_factory` of TRL: its methods are tools, and each answer has an
    object of its own."""
    max_iterations: int | None = field(
        default=None, validator=validators.optional(validators.ge(0))
    )
    """How many turns of an answer may call tools (`max_tool_calling_iterations` of TRL); null: as
    many as there is room for."""
    deadline: float = field(default=10.0, validator=validators.gt(0))
    """Seconds in which a tool has to return."""

    @property
    def are_set(self) -> bool:
        """Whether there are any."""
        return bool(self.functions or self.environment)

    @property
    def broken(self) -> str:
        """What is wrong with the settings together, as a message; "" if nothing is."""
        if not self.are_set and (self.max_iterations is not None or self.deadline != 10.0):
            return (
                "tools.max_iterations and tools.deadline have no effect without tools.functions or "
                "tools.environment"
            )
        return ""


@documented
@frozen(kw_only=True)
class Correction:
    """The weight of a token whose probability in training is not that with which it was drawn: an
    engine of another precision, or with older weights (`rollouts.lag`), has written it."""

    kind: Literal["none", "truncate", "mask"] = "truncate"
    """truncate: the ratio of both probabilities, at most high. mask: the same, 0 if it is outside
    low to high."""
    level: Literal["token", "sequence"] = "token"
    """Whose probabilities: token, each token's; sequence, those of the whole answer, whose ratio is
    the product of its tokens' and the weight of all of them (richardli.xyz/rl-collapse)."""
    high: float = field(default=2.0, validator=validators.gt(1))
    """The largest ratio (2 at fengyao.notion.site/off-policy-rl)."""
    low: float = field(default=0.5, validator=[validators.ge(0), validators.lt(1)])
    """mask: the smallest ratio; 0: no bound."""

    @property
    def broken(self) -> str:
        """What is wrong with the settings together, as a message; "" if nothing is."""
        if self.kind != "mask" and self.low != 0.5:
            return "correction.low has no effect without correction.kind mask"
        if self.kind == "none" and (self.high, self.level) != (2.0, "token"):
            return "correction.high and correction.level have no effect with correction.kind none"
        return ""


def check_lag(config: Config, correction: Correction, section: str) -> None:
    """Raise RLHFError if older weights write the answers and nothing corrects for it, or if tools
    answer between their turns."""
    if config.rollouts.lag and config.own.tools.are_set:
        raise RLHFError(
            f"{section}.tools cannot be combined with rollouts.lag, since answers of several turns "
            "are not written ahead; remove rollouts.lag"
        )
    if config.rollouts.lag and correction.kind == "none":
        raise RLHFError(
            f"{section}.correction.kind none cannot be combined with rollouts.lag: older weights "
            "write the answers, and only a correction makes up for that; set it to truncate or mask"
        )


@documented
@frozen(kw_only=True)
class Evaluation:
    """The answers to held-out prompts."""

    answers: int = field(default=1, validator=validators.gt(0))
    """Answers to each prompt; eval/reward is the mean over all of them."""
    temperature: float = field(default=0.0, validator=validators.ge(0))
    """Temperature at which they are sampled; 0 takes the most likely tokens."""
    threshold: float = 1.0
    """An answer with at least this reward passes: eval/avg@K and eval/pass@k count them."""

    @property
    def broken(self) -> str:
        """What is wrong with the settings together, as a message; "" if nothing is."""
        if self.answers > 1 and self.temperature == 0:
            return (
                f"eval.answers {self.answers} are the same with eval.temperature 0; set "
                "eval.temperature"
            )
        return ""


@documented
@frozen(kw_only=True)
class OnPolicyConfig:
    """The settings that every `OnPolicyTrainer` has; a trainer's own class adds to them."""

    rewards: tuple[RewardSpec, ...] = ()
    """What scores the answers: a list of functions, servers and reward models, each with its
    weight."""
    answers: int = field(default=8, validator=positive)
    """Answers to each prompt: its group."""
    max_new_tokens: int = field(default=512, validator=positive)
    """Maximum length of an answer."""
    temperature: float = field(default=1.0, validator=validators.ge(0.01))
    """Divides the logits when answers are drawn, and in the loss."""
    stop: str | None = field(default=None, validator=is_pattern)
    """Regular expression: an answer ends with the token that completes its first match."""
    tools: Tools = field(factory=Tools)
    """What the policy may call while it writes an answer."""
    correction: Correction = field(factory=Correction)
    """The weight of tokens whose probability in training differs from that in sampling."""
    agreement: float = field(default=0.05, validator=positive)
    """Largest mean difference, in nats, between the log-probabilities of the tokens of a rollout
    in sampling and in training; a larger one ends the run."""
    batches: int = field(default=1, validator=positive)
    """How many steps' prompts are answered at once."""
    passes: int = field(default=1, validator=positive)
    """How often the answers of a rollout are trained on."""
    eval: Evaluation = field(factory=Evaluation)
    """The answers to held-out prompts."""
    deadline: float = field(default=60.0, validator=positive)
    """Seconds in which a reward has to return."""
    workers: int = field(default=1, validator=positive)
    """Processes that call reward functions, and as many that call tools."""

    def __attrs_post_init__(self) -> None:
        sections = (self.eval, self.correction, self.tools)
        check_rules(*((section.broken, section.broken) for section in sections))


def check_on_policy(config: Config, section: str) -> None:
    """Raise RLHFError without rewards, and for what `rollouts.lag` cannot be combined with;
    `section` is the name of the trainer's settings, an `OnPolicyConfig`."""
    own: OnPolicyConfig = config.own
    if not own.rewards and own.tools.environment is None:
        raise RLHFError(f"{section}.rewards is empty; name a rule or a function, such as exact")
    check_lag(config, own.correction, section)
