"""The entropy of a policy as a part of its loss."""

import pytest
import torch
from torch import Tensor

from rlhf.readouts import Head
from rlhf.trainer import Answer, Example
from rlhf_devkit import pack
from rlhf_rollouts.entropy import logprobs_and_entropy


@pytest.mark.parametrize("softcap", [None, 2.0])
def test_the_entropy_has_the_value_and_gradient_of_its_definition(softcap: float | None) -> None:
    torch.manual_seed(0)
    batch = pack([Example([1, 2], [Answer([3, 4, 1]), Answer([2, 0])])], [0])
    hidden = torch.randn(len(batch.tokens), 4, requires_grad=True)
    weight, bias = torch.randn(5, 4, requires_grad=True), torch.randn(5, requires_grad=True)
    inputs = (hidden, weight, bias)

    def by_definition() -> Tensor:
        logits = (hidden[batch.predict_from] @ weight.T + bias) * 1.5
        if softcap is not None:
            logits = softcap * (logits / softcap).tanh()
        logprobs = (logits / 0.7).log_softmax(-1)
        return -(logprobs.exp() * logprobs).sum()

    head = Head(weight=weight, bias=bias, scale=1.5, softcap=softcap)
    read = logprobs_and_entropy(hidden, head, batch, temperature=0.7)
    expected = by_definition()
    torch.testing.assert_close(read["entropy_sum"], expected)
    torch.testing.assert_close(read["entropy"].sum(), expected)
    found = torch.autograd.grad(read["entropy_sum"], inputs)
    torch.testing.assert_close(found, torch.autograd.grad(expected, inputs))
