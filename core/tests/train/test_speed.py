"""Operations of a step, beside those that torch counts."""

import copy
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from torch.utils.flop_counter import FlopCounterMode

from rlhf.model.packed import PackedModel
from rlhf.model.shape import shape_of
from rlhf.train.speed import flops

TOKENS = 64
SIZES = {
    "vocab_size": 96, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 4,
}  # fmt: skip
MIXTURE = SIZES | {"num_experts_per_tok": 2, "moe_intermediate_size": 48}


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("LlamaConfig", {**SIZES, "tie_word_embeddings": True}),
        ("LlamaConfig", {**SIZES, "tie_word_embeddings": False}),
        ("MixtralConfig", MIXTURE | {"num_local_experts": 8}),
        ("Qwen3MoeConfig", MIXTURE | {"num_experts": 8, "head_dim": 16}),
        (
            "DeepseekV3Config",
            MIXTURE
            | {"n_routed_experts": 8, "n_shared_experts": 1, "n_group": 1, "topk_group": 1}
            | {"first_k_dense_replace": 1, "kv_lora_rank": 16, "q_lora_rank": 24}
            | {"qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 16},
        ),
    ],
)
def test_operations_are_those_that_torch_counts(kind: str, options: dict[str, Any]) -> None:
    torch.manual_seed(0)
    causal = transformers.AutoModelForCausalLM.from_config(
        getattr(transformers, kind)(**options),
        attn_implementation="eager",
        experts_implementation="eager",
    )
    shape = shape_of(PackedModel(copy.deepcopy(causal)))
    with FlopCounterMode(display=False) as counter:
        causal(torch.arange(TOKENS)[None] % 96, use_cache=False).logits.sum().backward()
    plan: Any = SimpleNamespace(
        lengths=np.array([TOKENS]), paths=np.array([TOKENS]), totals={"tokens": float(TOKENS)}
    )
    # Eager attention computes the other half too. Norms are parameters, but no products.
    half = 12 * shape.layers * shape.hidden * TOKENS**2 / 2
    assert flops(shape, plan) + half == pytest.approx(counter.get_total_flops(), rel=0.02)


def test_experts_of_which_all_are_used_have_no_idle_parameters() -> None:
    config = transformers.MixtralConfig(**MIXTURE, num_local_experts=2)
    causal = transformers.AutoModelForCausalLM.from_config(config)
    assert shape_of(PackedModel(causal)).idle == 0
