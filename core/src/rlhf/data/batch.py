"""The packed batch: several trees in one row of T tokens, without padding between them."""

from collections.abc import Callable
from typing import Any

import attrs
import numpy as np
import torch
from attrs import field, frozen
from torch import Tensor

from rlhf.config.field_docs import documented
from rlhf.devices import on_device

TOKEN_INPUTS = ("mm_token_type_ids", "token_type_ids", "position_ids")
"""Keyword arguments of transformers' models that describe tokens."""


@documented
@frozen(kw_only=True)
class PackedBatch:
    """One micro-batch. T tokens, N predictions, E examples, A answers; index tensors are int64.

    A token sees an earlier token of its own example that is on branch 0 (the prompt) or on its own
    branch: tree attention. Tokens that only round T up have example -1 and see themselves.
    """

    tokens: Tensor
    """Token ids [T]."""
    positions: Tensor
    """Position in its path [T]: 0 at the start of each example; every answer continues at the end
    of its prompt."""
    example: Tensor
    """Index of the example in this batch [T]; -1 for tokens that only round T up."""
    branch: Tensor
    """0 for tokens of the prompt, i for those of the i-th answer [T]."""
    predict_from: Tensor
    """Index in the row of the hidden state that predicts [N]. Position t predicts token t + 1."""
    predict_at: Tensor
    """Index in the row of the token that is predicted [N]."""
    predict: Tensor
    """The predicted token's id [N], `tokens[predict_at]`."""
    answer: Tensor
    """Index in this batch of the answer to which the prediction belongs [N]."""
    answer_example: Tensor
    """Index in this batch of the example to which the answer belongs [A]."""
    answer_end: Tensor
    """Index in the row of each answer's last token [A]."""
    rows: tuple[int, ...] = ()
    """Number of each example in its data set [E]; `Examples.name` returns the file and line of its
    row. Unique in a step, except for the parts of a tree of a rollout that is larger than
    `batch.tokens`."""
    values: dict[str, Tensor] = field(factory=dict)
    """The examples' values in float32: [E] per example, [A] per answer, [T] per token with nan
    where there is none."""
    inputs: dict[str, Any] = field(factory=dict)
    """Further keyword arguments of the model, such as pixel values, in the order of the tokens.
    Those in `TOKEN_INPUTS` have a row for each token [T, ...]."""
    input_rows: dict[str, tuple[int, ...]] = field(factory=dict)
    """Number of rows of each other input that belong to each prompt and answer, in the order of the
    batch and as integers on the host; last those of the blank."""
    blank: int = 0
    """Number of tokens after those of the examples that stand for images, in a batch whose examples
    have none: so the model computes images in every batch. They have example -1."""
    step: dict[str, Tensor] = field(factory=dict)
    """The values of the survey over the whole optimizer step, in the order of examples; with the
    places of this batch's own among them as `examples` [E] and `answers` [A]."""
    spans: tuple[tuple[int, tuple[int, ...]], ...] = ()
    """`(length of the prompt, lengths of the answers)` of each example in order, as integers on the
    host. Empty for a filler: a batch of tokens without examples, answers or predictions, which a
    rank without rows computes so that collectives match."""

    @property
    def num_tokens(self) -> int:
        """Number of tokens of examples, without those that only round T up."""
        return sum(prompt + sum(answers) for prompt, answers in self.spans)

    @property
    def num_examples(self) -> int:
        """Number of examples E."""
        return len(self.spans)

    @property
    def num_answers(self) -> int:
        """Number of answers A."""
        return sum(len(answers) for _, answers in self.spans)

    def to(self, device: torch.device | str) -> "PackedBatch":
        """Return a copy with every tensor on `device`; the host does not wait for it. Inputs that
        models read, such as the sizes of images, have their values on the host as `host`."""
        batch = map_tensors(self, lambda tensor: on_device(tensor, device))
        for name in self.inputs.keys() - {*TOKEN_INPUTS}:
            if not self.inputs[name].is_floating_point():
                batch.inputs[name] = batch.inputs[name].detach()
                batch.inputs[name].host = getattr(self.inputs[name], "host", self.inputs[name])
        return batch


def map_tensors(batch: PackedBatch, change: Callable[[Any], Any]) -> PackedBatch:
    """Return a copy with `change(value)` in place of every tensor or array."""

    def changed(value: Any) -> Any:
        if isinstance(value, dict):
            return {name: changed(item) for name, item in value.items()}
        return change(value) if isinstance(value, Tensor | np.ndarray) else value

    fields = attrs.fields(PackedBatch)
    return PackedBatch(**{item.name: changed(getattr(batch, item.name)) for item in fields})
