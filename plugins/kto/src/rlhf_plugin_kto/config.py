"""The section `kto`."""

from typing import Any, Literal

from attrs import field, frozen, validators

from rlhf.errors import RLHFError
from rlhf.plugin import Config, check_reference

positive: Any = validators.gt(0)
not_negative: Any = validators.ge(0)


@frozen(kw_only=True)
class KTOConfig:
    """Preference training on single answers that are good or bad (arXiv 2402.01306)."""

    beta: float = field(default=0.1, validator=positive)
    """Factor on the log-ratio to the reference: the smaller, the further the policy may move from
    it. 0.1 in the paper."""
    loss: Literal["kto", "apo_zero_unpaired"] = "kto"
    """kto: rewards relative to the policy's divergence from the reference. apo_zero_unpaired (arXiv
    2408.06266): relative to zero, without the pass over mismatched answers."""
    desirable_weight: float = field(default=1.0, validator=not_negative)
    """Weight of desirable rows. The paper keeps desirable_weight x desirable rows at 1 to 4/3 times
    undesirable_weight x undesirable rows (eq. 8)."""
    undesirable_weight: float = field(default=1.0, validator=not_negative)
    """Weight of undesirable rows."""
    reference: Literal["auto", "adapter", "engine", "cache"] = "auto"
    """adapter: the policy with its adapter off. engine: a frozen copy of the model. cache:
    log-probabilities on disk; the mismatched answers of kto are then the same in every epoch. auto:
    chosen for the run, which prints the reason."""


def check(config: Config) -> None:
    """Raise RLHFError for a reference that this run cannot have, and if no row has any weight."""
    if not (config.own.desirable_weight or config.own.undesirable_weight):
        raise RLHFError(
            "kto.desirable_weight and kto.undesirable_weight are both 0, so nothing is trained; "
            "raise one of them"
        )
    check_reference(config, config.own.reference)
