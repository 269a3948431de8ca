"""The section `kto`."""

from typing import Any, Literal

from attrs import field, frozen, validators

from rlhf.plugin import check_reference

positive: Any = validators.gt(0)
not_negative: Any = validators.ge(0)


@frozen(kw_only=True)
class KTOConfig:
    """Preference training on single answers that are good or bad (arXiv 2402.01306)."""

    beta: float = field(default=0.1, validator=positive)
    """Weight of the log-ratio to the reference: the smaller, the further the policy may go. 0.1 as
    in the paper."""
    loss: Literal["kto", "apo_zero_unpaired"] = "kto"
    """kto measures rewards from the policy's divergence; apo_zero_unpaired (arXiv 2408.06266) from
    zero, without the pass over mismatched answers."""
    desirable_weight: float = field(default=1.0, validator=not_negative)
    """Weight of the loss of desirable rows. The paper keeps desirable_weight x desirable rows at 1
    to 4/3 times undesirable_weight x undesirable rows (its eq. 8)."""
    undesirable_weight: float = field(default=1.0, validator=not_negative)
    """Weight of the loss of undesirable rows."""
    reference: Literal["auto", "adapter", "engine", "cache"] = "auto"
    """adapter: the policy with its adapter off; engine: a frozen copy of the model; cache: once, on
    disk, with apo_zero_unpaired alone, since the mismatched answers of kto are others in every
    epoch; auto chooses and says why."""


def check(config: Any) -> None:
    """Refuse a reference that this run cannot have, before anything loads. Raises RLHFError."""
    check_reference(config, config.own.reference, live=config.own.loss == "kto")
