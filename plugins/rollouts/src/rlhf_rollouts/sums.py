"""The rewards of demos: chains of sums, worked out line by line."""

from collections.abc import Sequence
from typing import Any


def right_lines(
    completions: Sequence[str], steps: Sequence[Sequence[str]], **others: Any
) -> list[float]:
    """Return the share of lines of each answer that are right; 0 if it has too few or too many."""
    return [share(text.splitlines(), known) for text, known in zip(completions, steps, strict=True)]


def solved(
    completions: Sequence[str], steps: Sequence[Sequence[str]], **others: Any
) -> list[float]:
    """Return 1 for each answer in which all lines are right, else 0."""
    return [float(each == 1) for each in right_lines(completions, steps)]


def share(lines: Sequence[str], known: Sequence[str]) -> float:
    """Return the share of `lines` that are those of `known` in the same place."""
    if len(lines) != len(known):
        return 0.0
    return sum(map(str.__eq__, lines, known)) / len(known)
