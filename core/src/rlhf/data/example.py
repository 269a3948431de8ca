"""A row as a tree: one prompt and the answers that share it."""

from collections.abc import Mapping, Sequence
from typing import Any

from attrs import field, frozen


@frozen
class Answer:
    """One continuation of the prompt."""

    tokens: Sequence[int]
    """Token ids."""
    trained: Sequence[bool] | None = None
    """Which tokens are trained on (predicted by the loss), one per token; None is all of them."""


@frozen
class Example:
    """One prompt and k answers, as token ids.

    `prompt` may be empty; an answer's first token is then not predicted, since nothing stands
    before it.
    """

    prompt: Sequence[int]
    answers: Sequence[Answer]
    values: Mapping[str, Any] = field(factory=dict)
    """Numbers for the loss by name: a float (per example), a list with one float per answer, or a
    list with one list per answer that holds one float per token of it (nan where there is none)."""
    inputs: Mapping[str, Any] = field(factory=dict)
    """Extra keywords for the model."""
