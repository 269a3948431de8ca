"""What ZeRO-3 gathers as one, and how its gradients are reduced."""

from typing import Any

import pytest
import torch
import transformers
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3
from deepspeed.utils import z3_leaf_module

from rlhf_plugin_deepspeed.leaves import (
    MARK,
    mark_experts,
    mark_layers,
    reduced_by_parameter,
)
from rlhf_plugin_deepspeed.patches.table import PATCHES

HOOKS = "create_reduce_and_remove_grad_hooks"
SIZES = {
    "vocab_size": 64, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 3,
    "num_attention_heads": 2, "num_key_value_heads": 2,
}  # fmt: skip


def decoder(family: str, **more: Any) -> Any:
    config = getattr(transformers, family)(**SIZES, **more)
    with torch.device("meta"):
        return transformers.AutoModelForCausalLM.from_config(config)


def test_every_layer_is_gathered_as_one() -> None:
    causal = decoder("LlamaConfig")
    assert mark_layers(causal, PATCHES) == list(causal.model.layers)
    leaves = [name for name, module in causal.named_modules() if z3_leaf_module(module)]
    assert leaves == ["model.layers.0", "model.layers.1", "model.layers.2"]


def test_only_the_experts_of_a_mixture_are_leaves() -> None:
    causal = decoder("MixtralConfig", num_local_experts=2, num_experts_per_tok=1)
    experts = mark_experts(causal)
    assert len(experts) == 3
    assert mark_layers(causal, PATCHES) == []
    assert [name for name, module in causal.named_modules() if z3_leaf_module(module)] == experts


def test_a_model_that_is_only_run_gathers_layers_with_their_experts() -> None:
    causal = decoder("MixtralConfig", num_local_experts=2, num_experts_per_tok=1)
    causal.requires_grad_(False)
    assert mark_layers(causal, PATCHES) == list(causal.model.layers)


def test_layers_that_share_weights_are_not_leaves() -> None:
    causal = decoder("LlamaConfig")
    causal.model.layers[2].mlp = causal.model.layers[0].mlp
    assert mark_layers(causal, PATCHES) == []


def test_without_the_patch_layers_of_a_trained_model_are_not_leaves() -> None:
    assert mark_layers(decoder("LlamaConfig"), ()) == []


def test_gradients_of_leaf_layers_are_reduced_as_without_leaves(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # That they are right is in test_curves.py.
    seen: list[bool] = []
    layer, other = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)
    parameters = [*layer.parameters(), *other.parameters()]
    for parameter in parameters:
        setattr(parameter, MARK, layer)

    def register(self: Any) -> None:
        seen.extend(hasattr(item, MARK) for item in parameters)

    monkeypatch.setattr(DeepSpeedZeroOptimizer_Stage3, HOOKS, register)
    with reduced_by_parameter([layer, layer]):
        getattr(DeepSpeedZeroOptimizer_Stage3, HOOKS)(None)
    assert seen == [False, False, True, True]
    assert getattr(DeepSpeedZeroOptimizer_Stage3, HOOKS) is register
