"""What ZeRO-3 gathers as one."""

from typing import Any

import pytest
from deepspeed.utils import z3_leaf_module
from transformers import AutoModelForCausalLM, LlamaConfig

from rlhf_plugin_deepspeed.leaves import mark_layers


def leaves(causal: Any) -> list[bool]:
    mark_layers(causal)
    assert not any(z3_leaf_module(part) for part in causal.model.layers[0].children())
    return [z3_leaf_module(layer) for layer in causal.model.layers]


@pytest.fixture
def causal() -> Any:
    return AutoModelForCausalLM.from_config(
        LlamaConfig(
            vocab_size=64, hidden_size=16, intermediate_size=32, num_hidden_layers=3,
            num_attention_heads=2,
        )
    )  # fmt: skip


def test_layers_that_are_trained_stay_as_they_are(causal: Any) -> None:
    assert leaves(causal) == [False, False, False]


def test_a_model_that_is_only_run_gathers_every_layer_as_one(causal: Any) -> None:
    causal.requires_grad_(False)
    assert leaves(causal) == [True, True, True]
