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
    """What is read at the end of each step. head: a token classifier with the labels wrong and
    right. token: the language-model head's choice between two reward tokens."""
    reward_tokens: tuple[str, str] | None = None
    """Formulation token: the tokens for a right and for a wrong step; default + and - (arXiv
    2312.08935)."""
    separator: str = "\n"
    """Text at the end of each step; with a placeholder only between steps."""
    placeholder: str | None = None
    """Text that marks the end of each step. It is added to steps in a list, and expected in rows
    whose steps are one text."""
    steps: Literal["all", "last"] = "all"
    """Which labelled steps count: all, or only the last one of each row (an outcome reward)."""

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
