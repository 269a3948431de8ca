"""Worked arithmetic problems, made by rule: the embedded rows of every trainer's demo."""

import hashlib
import random
from collections.abc import Iterator
from typing import Any

from attrs import frozen

from rlhf.plugin import documented

LARGEST = 99
QUESTIONS = ("What is {}?", "Compute {}.", "Work out {}.", "How much is {}?")
SIZES = {"train": 4000, "eval": 200}
EVAL_SHARE = 20
"""One problem in so many is held out, by a hash of the problem itself: no problem is on both
sides."""


@documented
@frozen
class Problem:
    """A chain of additions and subtractions that never leaves 0 to 99."""

    question: str
    """A sentence that asks for its result."""
    steps: tuple[str, ...]
    """Each worked step, `12 + 7 = 19`, then the sentence with the answer."""
    answer: int
    """The result."""

    @property
    def solution(self) -> str:
        """The steps, one per line."""
        return "\n".join(self.steps)


def problems(split: str) -> Iterator[Problem]:
    """Yield the problems of `train` or `eval`, each once, always in the same order."""
    draw = random.Random(f"arithmetic {split}")
    seen: set[str] = set()
    while len(seen) < SIZES[split]:
        numbers, signs = _chain(draw)
        expression = _expression(numbers, signs)
        if expression in seen or _held_out(expression) != (split == "eval"):
            continue
        seen.add(expression)
        steps, answer = _work(numbers, signs)
        yield Problem(draw.choice(QUESTIONS).format(expression), steps, answer)


def with_a_slip(problem: Problem, draw: random.Random) -> tuple[Problem, int]:
    """Return the same problem with one wrong step whose result is carried on, and the number of
    that step."""
    operations = [step.split() for step in problem.steps[:-1]]
    place = draw.randrange(len(operations))
    value = int(operations[0][0])
    steps = []
    for number, (_, sign, operand, _, _) in enumerate(operations):
        right = value + int(operand) if sign == "+" else value - int(operand)
        result = _other(right, draw) if number == place else right
        steps.append(f"{value} {sign} {operand} = {result}")
        value = result
    return Problem(problem.question, (*steps, _sentence(value)), value), place


def equations(split: str) -> Iterator[str]:
    """Plain text of sums and of chains of them worked out: what the base model is made from. No
    held-out problem is in the training text."""
    draw = random.Random(f"equations {split}")
    for _ in range(SIZES[split] * 5):
        chains = [_worked(draw, split) for _ in range(3)]
        yield "\n".join([*chains, *(_equation(draw) for _ in range(2))])


def demonstration(problem: Problem, draw: random.Random) -> dict[str, Any]:
    """Return a conversation of one question and its worked solution."""
    return {
        "messages": [
            {"role": "user", "content": problem.question},
            {"role": "assistant", "content": problem.solution},
        ]
    }


def prompt(problem: Problem, draw: random.Random) -> dict[str, Any]:
    """Return a question without an answer, and the answer in a column."""
    question = [{"role": "user", "content": problem.question}]
    return {"prompt": question, "answer": str(problem.answer)}


def sums(split: str) -> Iterator[dict[str, Any]]:
    """Yield chains of two operations, each with its worked `steps`. The base model has seen
    `1 + 2 + 3:`, but not the brackets of `(1 + 2 + 3):`."""
    draw, seen = random.Random(f"sums {split}"), set[str]()
    while len(seen) < SIZES[split]:
        numbers, signs = _chain(draw)
        expression = _expression(numbers, signs)
        new = len(signs) == 2 and expression not in seen
        if new and _held_out(expression) == (split == "eval"):
            seen.add(expression)
            steps, _ = _work(numbers, signs)
            yield {"prompt": f"({expression}):\n", "steps": list(steps[:-1])}


def preference(problem: Problem, draw: random.Random) -> dict[str, Any]:
    """Return the right solution against one with a slip."""
    wrong, _ = with_a_slip(problem, draw)
    return {
        "prompt": [{"role": "user", "content": problem.question}],
        "chosen": [{"role": "assistant", "content": problem.solution}],
        "rejected": [{"role": "assistant", "content": wrong.solution}],
    }


def ranked(problem: Problem, draw: random.Random) -> dict[str, Any]:
    """Four answers in any order: the right solution is best, then one that stops before its answer,
    a wrong guess without any work, and the solution of another problem."""
    stranger, _ = _work(*_chain(draw))
    best_first = [
        problem.solution,
        "\n".join(problem.steps[:-1]),
        _sentence(_other(problem.answer, draw)),
        "\n".join(stranger),
    ]
    order = draw.sample(range(4), 4)
    return {
        "prompt": problem.question + "\n",
        "answers": [best_first[place] for place in order],
        "ranks": [place + 1 for place in order],
    }


def unpaired(problem: Problem, draw: random.Random) -> dict[str, Any]:
    """Return a solution and whether it is right; half of them are."""
    right = draw.random() < 0.5
    shown = problem if right else with_a_slip(problem, draw)[0]
    return {
        "prompt": [{"role": "user", "content": problem.question}],
        "completion": [{"role": "assistant", "content": shown.solution}],
        "label": right,
    }


def _chain(draw: random.Random) -> tuple[list[int], list[str]]:
    numbers, signs = [draw.randint(1, LARGEST)], []
    value = numbers[0]
    for _ in range(draw.choice((2, 3))):
        sign = draw.choice("+-")
        room = LARGEST - value if sign == "+" else value
        if room < 1:
            sign, room = ("-", value) if sign == "+" else ("+", LARGEST - value)
        numbers.append(draw.randint(1, room))
        signs.append(sign)
        value += numbers[-1] if sign == "+" else -numbers[-1]
    return numbers, signs


def _work(numbers: list[int], signs: list[str]) -> tuple[tuple[str, ...], int]:
    value, steps = numbers[0], []
    for sign, number in zip(signs, numbers[1:], strict=True):
        result = value + number if sign == "+" else value - number
        steps.append(f"{value} {sign} {number} = {result}")
        value = result
    return (*steps, _sentence(value)), value


def _equation(draw: random.Random) -> str:
    left = draw.randint(0, LARGEST)
    if draw.random() < 0.5:
        right = draw.randint(0, LARGEST - left)
        return f"{left} + {right} = {left + right}"
    right = draw.randint(0, left)
    return f"{left} - {right} = {left - right}"


def _worked(draw: random.Random, split: str) -> str:
    while True:
        numbers, signs = _chain(draw)
        expression = _expression(numbers, signs)
        if _held_out(expression) == (split == "eval"):
            steps, _ = _work(numbers, signs)
            return "\n".join([f"{expression}:", *steps[:-1]])


def _expression(numbers: list[int], signs: list[str]) -> str:
    rest = (f" {sign} {number}" for sign, number in zip(signs, numbers[1:], strict=True))
    return str(numbers[0]) + "".join(rest)


def _sentence(answer: int) -> str:
    return f"The answer is {answer}."


def _other(right: int, draw: random.Random) -> int:
    """Return a wrong result near the right one that still lies between 0 and 99."""
    near = [right + off for off in range(-10, 11) if off and 0 <= right + off <= LARGEST]
    return draw.choice(near) if near else draw.randint(0, LARGEST)


def _held_out(expression: str) -> bool:
    return hashlib.sha256(expression.encode()).digest()[0] % EVAL_SHARE == 0
