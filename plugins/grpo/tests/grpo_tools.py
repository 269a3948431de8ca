"""Tools, an environment and a reward, in a file that loads at once."""

from collections.abc import Sequence
from typing import Any


def add(a: int, b: int) -> int:
    """Add two numbers.

    Args:
        a: The first number.
        b: The second number.
    """
    return a + b


class Sums:
    """Adds, and rewards the number of sums."""

    def reset(self, answer: str, **row: Any) -> str:
        self.sums = 0
        return f" It has {len(answer)} digits."

    def add(self, a: int, b: int) -> int:
        """Add two numbers.

        Args:
            a: The first number.
            b: The second number.
        """
        self.sums += 1
        return a + b

    def get_reward(self) -> float:
        return float(self.sums)


def digits(completions: Sequence[Any], **others: Any) -> list[float]:
    """Return how many digits the tools returned, after a check of what rewards get."""
    for messages in completions:
        assert [it["role"] for it in messages[1::2]] == ["tool"] * (len(messages) // 2)
    return [
        float(sum(len(it["content"]) for it in messages if it["role"] == "tool"))
        for messages in completions
    ]
