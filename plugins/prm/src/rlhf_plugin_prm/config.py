"""The section `prm`."""

from typing import Literal

from attrs import frozen

from rlhf.plugin import check_rules

POSITIVE, NEGATIVE = "+", "-"
"""The reward tokens of Math-Shepherd (arXiv 2312.08935)."""


@frozen(kw_only=True)
class PRMConfig:
    """Process reward models."""

    formulation: Literal["head", "token"] = "head"
    """head: a token classifier (labels wrong and right) at the end of each step; token: the
    language-model head's choice between two reward tokens there."""
    reward_tokens: tuple[str, str] | None = None
    """Of formulation token: what is said of a right step and of a wrong one, one token each;
    default + and - (arXiv 2312.08935)."""
    separator: str = "\n"
    """Ends each step, the last one too; with a placeholder it only stands between steps."""
    placeholder: str | None = None
    """Text that marks the end of each step: put there, or found in the row's own text."""
    steps: Literal["all", "last"] = "all"
    """Train on and evaluate all labelled steps, or the last one of each row alone (an outcome
    reward)."""

    def __attrs_post_init__(self) -> None:
        check_rules(
            (
                "reward_tokens need formulation token",
                self.reward_tokens is not None and self.formulation == "head",
            ),
            (
                "separator is empty; a step needs a text that ends it",
                not (self.separator or self.placeholder),
            ),
        )
