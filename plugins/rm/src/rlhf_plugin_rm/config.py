"""The section `rm`."""

from collections.abc import Mapping
from typing import Any, ClassVar, Literal

from attrs import field, frozen, validators

from rlhf.plugin import Config, RLHFError


@frozen(kw_only=True)
class RMConfig:
    """Reward models."""

    removed_settings: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        "loss": ("bradley_terry", "log_exp")
    }
    ranking: Literal["pairs", "plackett_luce"] = "pairs"
    """How more than two answers are ranked. pairs: -log sigmoid(d - margin) of every pair, d the
    difference of its rewards, averaged over the row's pairs (arXiv 2203.02155). plackett_luce: the
    negative log-likelihood of the whole order. The same for two answers."""
    margin: float = field(default=1.0, validator=validators.ge(0))
    """Factor on the `margin` of the rows (Llama 2, arXiv 2307.09288); 0 ignores it."""
    centring: float = field(default=0.0, validator=validators.ge(0))
    """Coefficient of (chosen + rejected)^2, which keeps rewards near zero; 0.01 in arXiv
    2312.09244."""
    normalise: bool = False
    """Whether `rlhf_plugin_rm.scorer` returns (reward - mean) / deviation by default, with the mean
    and deviation of the held-out rows. The exported config.json has both in any case."""


def check(config: Config) -> None:
    """Raise RLHFError if rewards are to be normalised without held-out rows."""
    if config.own.normalise and not config.data.eval:
        raise RLHFError("rm.normalise needs held-out rows to measure rewards on; set data.eval")
