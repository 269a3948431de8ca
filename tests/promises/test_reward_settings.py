"""A trainer's section has a list of rewards, whose mistakes are reported with their place."""

from attrs import frozen

from rlhf.config.structure import structure
from rlhf_rollouts.rewards import RewardSpec


@frozen(kw_only=True)
class Section:
    """The settings of a trainer."""

    rewards: tuple[RewardSpec, ...] = ()


def test_a_section_has_a_list_of_rewards() -> None:
    structured = structure({"rewards": "number"}, Section)
    assert structured == (Section(rewards=(RewardSpec(function="number"),)), [])
    items = ["numbr", {"weight": 2}, {"function": "exact", "column": "solution"}]
    assert structure({"rewards": items}, Section) == (None, [
        "rewards.0.function: 'numbr' is not a shipped rule; did you mean number? available: exact, "
        "number, boxed, format, soft_overlong, repetition, and functions of yours as module:name "
        "or file.py:name",
        "rewards.1: a reward needs one of function, url and model",
        "rewards.2.column: is an option of a rule; write it into `options`",
    ])  # fmt: skip
