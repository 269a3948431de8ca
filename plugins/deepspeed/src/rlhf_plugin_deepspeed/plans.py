"""The plan of a model under ZeRO."""

from attrs import Factory, field, frozen

from rlhf.engine import Plan


@frozen(kw_only=True)
class ZeroPlan(Plan):
    """`settings` are DeepSpeed's JSON."""

    stage: int
    """0 to 3."""
    sharded: bool = field(default=Factory(lambda plan: plan.stage == 3, takes_self=True))
