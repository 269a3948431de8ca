"""Demo rows in the format `rewarded`: sums with one right answer and two that are one too large."""

import random
from typing import Any

from rlhf_demo import Problem


def rewarded(problem: Problem, draw: random.Random) -> dict[str, Any]:
    """Return the first step of a problem with three answers, of which the right one has a reward.
    A model that imitates them all makes the mistake that is more frequent."""
    left, right = problem.steps[0].split(" =")
    answers = [right, *[f" {int(right) + 1}"] * 2]
    order = draw.sample(range(3), 3)
    return {
        "prompt": f"{left} =",
        "completions": [answers[place] for place in order],
        "rewards": [float(place == 0) for place in order],
    }
