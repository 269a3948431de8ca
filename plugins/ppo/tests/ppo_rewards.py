"""Rewards of the tests, as users write them."""

from typing import Any


def few_letters(completions: Any, **columns: Any) -> list[float]:
    texts = [each[0]["content"] for each in completions]
    return [-float(sum(letter.isalpha() for letter in text)) for text in texts]


def short(completions: Any, completion_ids: Any, **columns: Any) -> list[float]:
    return [-float(len({*ids})) for ids in completion_ids]


def nothing(completions: Any, **columns: Any) -> list[Any]:
    return [None for _ in completions]
