"""PackedBatch: several trees in one row of T tokens, without padding between them."""

from typing import Any

import attrs
import torch
from attrs import field, frozen
from torch import Tensor


@frozen(kw_only=True)
class PackedBatch:
    """One micro-batch. T tokens, N predictions, E examples, A answers; index tensors are int64.

    A token sees an earlier token of its own example that is on branch 0 (the prompt) or on its own
    branch: tree attention. Tokens that only round T up have example -1 and see themselves.
    """

    tokens: Tensor
    """Token ids [T]."""
    positions: Tensor
    """Position in its path [T]: from 0 in every example; each answer goes on from its prompt's
    end."""
    example: Tensor
    """Which example of this batch [T], -1 for tokens that only round T up."""
    branch: Tensor
    """0 on the prompt, i on the i-th answer [T]."""
    predict_from: Tensor
    """Row index of the hidden state that predicts [N]. Position t predicts token t + 1."""
    predict_at: Tensor
    """Row index of the token that is predicted [N]."""
    predict: Tensor
    """The predicted token's id [N], `tokens[predict_at]`."""
    answer: Tensor
    """Which answer of this batch a prediction belongs to [N]."""
    answer_example: Tensor
    """Which example of this batch an answer belongs to [A]."""
    answer_end: Tensor
    """Row index of each answer's last token [A]."""
    rows: tuple[int, ...] = ()
    """Number of each example in its data set [E], unique in a step (a row of the file may have made
    several examples, or be taken several times); `Examples.name` tells where it came from."""
    values: dict[str, Tensor] = field(factory=dict)
    """The examples' values, float32: [E], [A] or, for values per token, [T] with nan elsewhere."""
    inputs: dict[str, Any] = field(factory=dict)
    """Extra keywords for the model."""
    step: dict[str, Tensor] = field(factory=dict)
    """The survey's values over the whole optimizer step, in the order of examples."""
    spans: tuple[tuple[int, tuple[int, ...]], ...] = ()
    """Of each example its prompt's length and its answers' lengths, in row order: the layout of T,
    as plain integers on the host. Empty for a filler, which keeps a rank in step with the others
    and has tokens but neither examples nor answers nor predictions."""

    @property
    def num_tokens(self) -> int:
        """Tokens of examples; the others only round the row up."""
        return sum(prompt + sum(answers) for prompt, answers in self.spans)

    @property
    def num_examples(self) -> int:
        return len(self.spans)

    @property
    def num_answers(self) -> int:
        return sum(len(answers) for _, answers in self.spans)

    def to(self, device: torch.device) -> "PackedBatch":
        """A copy with every tensor on `device`, without waiting for the copy."""

        def move(value: Any) -> Any:
            if isinstance(value, Tensor):
                return value.to(device, non_blocking=True)
            if isinstance(value, dict):
                return {name: move(item) for name, item in value.items()}
            return value

        fields = attrs.fields(type(self))
        return PackedBatch(**{item.name: move(getattr(self, item.name)) for item in fields})
