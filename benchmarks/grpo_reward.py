"""A reward of the answers of `grpo.py`, which both sides compute."""

from collections.abc import Sequence
from typing import Any


def remainder(
    completions: Sequence[str], completion_ids: Sequence[Sequence[int]], **others: Any
) -> list[float]:
    """Return a number from 0 to 0.99 for each answer, which depends on its tokens."""
    return [sum(ids) % 100 / 100 for ids in completion_ids]
