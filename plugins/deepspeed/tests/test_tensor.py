"""Layers divided over the tensor axis, in one process."""

from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from rlhf.engine import Axis
from rlhf_plugin_deepspeed import tensor


@pytest.mark.parametrize(("recomputed", "passes"), [(False, 1), (True, 2)])
def test_layers_with_the_same_input_share_the_sum_of_its_gradient(
    recomputed: bool, passes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = LlamaConfig(
        hidden_size=16, intermediate_size=32, num_hidden_layers=3, num_attention_heads=2,
        num_key_value_heads=2, vocab_size=8,
    )  # fmt: skip
    model = LlamaForCausalLM(config).train()
    tensor.divide(model, Axis())
    if recomputed:
        model.gradient_checkpointing_enable()
    sums: list[Any] = []
    summed = tensor.with_summed_gradient

    def counted(*arguments: Any) -> Any:
        sums.append(arguments)
        return summed(*arguments)

    monkeypatch.setattr(tensor, "with_summed_gradient", counted)
    model(torch.arange(8)[None]).logits.sum().backward()
    # One for the attention and one for the feed-forward part of each layer.
    assert len(sums) == passes * 2 * 3
