"""Rewards of the tests, as users write them."""

from typing import Any


def texts(completions: Any) -> list[str]:
    return [each[0]["content"] for each in completions]


def few_letters(completions: Any, **columns: Any) -> list[float]:
    return [-float(sum(letter.isalpha() for letter in text)) for text in texts(completions)]


def short(completions: Any, completion_ids: Any, **columns: Any) -> list[float]:
    return [-float(len({*ids})) for ids in completion_ids]


def raises(completions: Any, **columns: Any) -> list[float]:
    raise ValueError("no such column")


def too_few(completions: Any, **columns: Any) -> list[float]:
    return [1.0]


def text(completions: Any, **columns: Any) -> list[Any]:
    return ["good" for _ in completions]


def nothing(completions: Any, **columns: Any) -> list[Any]:
    return [None for _ in completions]


def until_step_2(completions: Any, trainer_state: Any, **columns: Any) -> list[float]:
    early = trainer_state.global_step < 2
    return [float(early) for _ in completions]


def logging(completions: Any, trainer_state: Any, log_metric: Any, **columns: Any) -> list[float]:
    log_metric("steps_before", trainer_state.global_step)
    return [float(number % 2) for number, _ in enumerate(completions)]


def squared(logprobs: Any, old: Any, drawn: Any, advantages: Any, answer: Any) -> Any:
    return -advantages * logprobs + 0.1 * (logprobs - old + 1).square()
