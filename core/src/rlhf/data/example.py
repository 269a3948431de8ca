"""One row as a tree: a prompt and the answers that share it."""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from attrs import field, frozen

from rlhf.config.field_docs import documented


@documented
@frozen
class Answer:
    """One continuation of the prompt."""

    tokens: Sequence[int]
    """Token ids."""
    trained: Sequence[bool] | None = None
    """Whether the loss predicts each token; None means that it predicts all of them."""


@documented
@frozen
class Example:
    """One prompt and k answers, as token ids.

    All answers see the same prompt, and none sees another.
    """

    prompt: Sequence[int]
    """Token ids, perhaps none: then nothing precedes the first token of an answer, and the loss
    does not predict it."""
    answers: Sequence[Answer]
    """The continuations of the prompt, each with at least one token: at least one, or none if the
    trainer's `rollout` writes them."""
    values: Mapping[str, Any] = field(factory=dict)
    """Numbers for the loss by name, all examples with the same names. A float is per example, a
    list of floats per answer, a list of lists per token: one list for each answer with one float
    for each of its tokens, nan for tokens without a value."""
    inputs: Mapping[str, Any] = field(factory=dict)
    """Further keyword arguments of the model, such as pixel values: tensors, arrays or nested
    lists; floating-point tensors and float64 become float32. Those of the examples in a batch are
    concatenated along the first dimension, in the order of the tokens; where other dimensions
    differ they end in zeros. `mm_token_type_ids`, `token_type_ids` and `position_ids` have a row
    for each token; `segment_rows` [1 + answers, inputs] says how many rows of each other input, by
    name, belong to the prompt and to each answer, without it all to the prompt."""
    columns: Mapping[str, Any] = field(factory=dict)
    """What `rollout` needs of the row, such as the text that a reward compares with: plain data for
    JSON, which the cache keeps and the loss does not get."""
    row: str = ""
    """Where the row came from, such as `train.jsonl line 3`, for `rollout` only."""


def num_tokens(example: Example) -> int:
    """Return the tokens of the tree; the prompt counts once."""
    return len(example.prompt) + sum(len(answer.tokens) for answer in example.answers)


def longest_path(example: Example) -> int:
    """Return the tokens of the prompt and the longest answer."""
    return len(example.prompt) + max((len(it.tokens) for it in example.answers), default=0)


class ExampleMaker(Protocol):
    """What makes examples of rows: `rlhf.trainer.Trainer`."""

    config: Any

    @property
    def row_format(self) -> str | None:
        """The format in which `example` gets rows."""

    @property
    def renders_whole(self) -> bool:
        """Whether prompt and answer are rendered as one text."""

    def example(self, row: Any) -> Example:
        """Return the example that a row becomes."""

    def needs_rollout(self) -> bool:
        """Return whether examples get their answers in the run."""
