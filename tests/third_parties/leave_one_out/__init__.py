"""REINFORCE with a baseline from the other answers. The record of the trainer."""

from attrs import field, frozen, validators

from rlhf.plugin import TrainerPlugin


@frozen(kw_only=True)
class LeaveOneOutConfig:
    """RLOO (arXiv 2402.14740), with the share of even tokens in an answer as its reward."""

    answers: int = field(default=4, validator=validators.ge(2))
    """Answers that are sampled for each prompt."""
    max_new_tokens: int = field(default=12, validator=validators.gt(0))
    """Most tokens of an answer."""
    temperature: float = field(default=1.0, validator=validators.gt(0))
    """Temperature of the samples, and of the log-probabilities that are trained."""


plugin = TrainerPlugin(
    config=LeaveOneOutConfig,
    trainer="rlhf_trainer_leave_one_out.trainer:LeaveOneOut",
    defaults={"optim.lr": 1e-6},
)
