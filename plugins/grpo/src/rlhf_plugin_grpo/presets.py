"""What the methods of the family are: each preset has the settings of its paper."""

from typing import Any, Literal

import attrs
from attrs import frozen

Advantage = Literal["mean", "leave_one_out", "none"]
Scale = Literal["none", "group", "batch"]
Aggregation = Literal["sum_then_normalize", "normalize_then_sum"]
Ratio = Literal["token", "sequence"]
ClipKind = Literal["ppo", "cispo", "none"]
Per = Literal["tokens", "answers", "constant"]
Place = Literal["loss", "reward"]
Truncated = Literal["count", "mask", "soft"]
Filter = Literal["none", "zero_variance"]


@frozen(kw_only=True)
class Method:
    """The choices that tell the methods apart, as `GRPOConfig` documents them."""

    advantage: Advantage = "mean"
    scale: Scale = "none"
    aggregation: Aggregation = "sum_then_normalize"
    ratio: Ratio = "token"
    clip_kind: ClipKind = "ppo"
    clip_low: float = 0.2
    clip_high: float = 0.2
    per: Per = "tokens"
    kl_beta: float = 0.0
    kl_in: Place = "loss"
    truncated: Truncated = "count"
    filter: Filter = "none"

    def changed(self, other: "Method") -> list[str]:
        """Return the settings in which this method differs from `other`, with both values."""
        names = [item.name for item in attrs.fields(Method)]
        pairs = {name: (getattr(self, name), getattr(other, name)) for name in names}
        return [
            f"{name.replace('_', '.', 1)} {shown(own)} instead of {shown(its)}"
            for name, (own, its) in pairs.items()
            if own != its
        ]


PRESETS = {
    "dapo": Method(scale="group", clip_high=0.28, truncated="soft", filter="zero_variance"),
    "dr_grpo": Method(per="constant"),
    "grpo": Method(scale="group", per="answers", kl_beta=0.04),
    "rloo": Method(
        advantage="leave_one_out", clip_kind="none", per="constant", kl_beta=0.05, kl_in="reward"
    ),
    "reinforce_pp": Method(scale="batch"),
    "gspo": Method(scale="group", ratio="sequence", clip_low=3e-4, clip_high=4e-4, per="answers"),
    "cispo": Method(scale="group", clip_kind="cispo", clip_high=4.0),
}
"""DAPO (arXiv 2503.14476), Dr. GRPO (2503.20783), GRPO (2402.03300), RLOO (2402.14740; the
coefficient of KL is TRL's), REINFORCE++ with a group baseline (2501.03262), GSPO (2507.18071), and
CISPO (2506.13585) with the largest weight 5 of ScaleRL (2510.13786)."""


def shown(value: Any) -> str:
    """Return a setting's value as text."""
    return f"{value:g}" if isinstance(value, float) else str(value)
