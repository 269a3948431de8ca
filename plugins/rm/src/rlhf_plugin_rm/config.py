"""The section `rm`."""

from typing import Any, Literal

from attrs import field, frozen, validators

from rlhf.errors import RLHFError


@frozen(kw_only=True)
class RMConfig:
    """Reward models."""

    loss: Literal["bradley_terry", "log_exp"] = "bradley_terry"
    """Loss of a pair: -log sigmoid(d - margin), or log(1 + exp(margin - d)). They are the same
    function, here in forms that cannot overflow, under the two names that it has in the field."""
    ranking: Literal["pairs", "plackett_luce"] = "pairs"
    """Rows with more than two answers: the mean over all pairs of an answer list (arXiv
    2203.02155), or the likelihood of the whole order. They agree on two answers."""
    margin: float = field(default=1.0, validator=validators.ge(0))
    """Factor on the rows' `margin` (Llama 2, arXiv 2307.09288); 0 leaves it out."""
    centring: float = field(default=0.0, validator=validators.ge(0))
    """Coefficient of (chosen + rejected)^2, which holds rewards near zero (arXiv 2312.09244 takes
    0.01)."""
    normalise: bool = False
    """Ask users of the exported model for (reward - mean) / deviation, both as measured on the
    held-out rows. They stand in its config.json in any case; `rlhf_plugin_rm.scorer` obeys."""


def check(config: Any) -> None:
    """Refuse a statistic of rows that are not there, before anything loads. Raises RLHFError."""
    if config.own.normalise and not config.data.eval:
        raise RLHFError("rm.normalise needs held-out rows to measure rewards on: set data.eval")
