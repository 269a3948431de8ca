"""The section `ilql`."""

from typing import Any

from attrs import field, frozen, validators

not_negative: Any = validators.ge(0)
share: Any = [not_negative, validators.le(1)]


@frozen(kw_only=True)
class ILQLConfig:
    """Offline RL from answers with rewards (arXiv 2206.11871). Names and defaults are those of
    trlX."""

    tau: float = field(default=0.7, validator=share)
    """Expectile of Q that V estimates: 0.5 is the mean, 1 the best token of the data."""
    gamma: float = field(default=0.99, validator=share)
    """Discount of the value of the next token."""
    cql_scale: float = field(default=0.1, validator=not_negative)
    """Weight of the cross entropy of Q, which keeps Q low for tokens that the data does not
    have."""
    awac_scale: float = field(default=1.0, validator=not_negative)
    """Weight of the cross entropy of the language model."""
    beta: float = field(default=0.0, validator=not_negative)
    """Inverse temperature of the weights exp(beta (Q - V)) in the cross entropy of the language
    model; 0 weights all tokens equally. Answers are written with a beta of their own."""
    alpha: float = field(default=0.001, validator=share)
    """Share of the Q heads in each move of their target heads."""
    steps_for_target_q_sync: int = field(default=5, validator=validators.ge(1))
    """Optimizer steps between two moves of the target heads."""
    two_qs: bool = True
    """Whether there are two Q heads, of which the lower one counts, or one."""
