"""Demo rows in the format `stepwise`: worked arithmetic problems with a label for each step."""

import random
from typing import Any

from rlhf_demo import Problem

LARGEST = 99


def stepwise(problem: Problem, draw: random.Random) -> dict[str, Any]:
    """Return steps with a label each: everything from a stray number on is wrong."""
    shown, first_wrong = problem, len(problem.steps)
    if draw.random() < 0.5:
        shown, first_wrong = with_a_stray_number(problem, draw)
    return {
        "prompt": problem.question + "\n",
        "completions": list(shown.steps),
        "labels": [number < first_wrong for number in range(len(shown.steps))],
    }


def with_a_stray_number(problem: Problem, draw: random.Random) -> tuple[Problem, int]:
    """Return the same problem with one step that takes a number which is not the question's,
    rightly worked out from there on, and the number of that step."""
    operations = [step.split() for step in problem.steps[:-1]]
    place = draw.randrange(len(operations))
    value = int(operations[0][0])
    steps = []
    for number, (_, sign, text, _, _) in enumerate(operations):
        operand = _far_from(int(text), draw) if number == place else int(text)
        result = value + operand if sign == "+" else value - operand
        steps.append(f"{value} {sign} {operand} = {result}")
        value = result
    return Problem(problem.question, (*steps, f"The answer is {value}."), value), place


def _far_from(number: int, draw: random.Random) -> int:
    """Return a number from 1 to 99 that is not a neighbour of another one."""
    return draw.choice([other for other in range(1, LARGEST + 1) if abs(other - number) > 10])
