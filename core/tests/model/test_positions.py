"""Rows that are longer than a model's positions reach."""

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    OPTConfig,
    OPTForCausalLM,
)

from rlhf.errors import RLHFError
from rlhf.model.shape import check_positions, position_table

SMALL = {"vocab_size": 64, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
REACH = {"max_position_embeddings": 32}
MODELS = {
    "gpt2": lambda: GPT2LMHeadModel(
        GPT2Config(vocab_size=64, n_positions=32, n_embd=24, n_layer=1)
    ),
    "opt": lambda: OPTForCausalLM(OPTConfig(**SMALL, **REACH, ffn_dim=16, word_embed_proj_dim=16)),
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**SMALL, **REACH, intermediate_size=16)),
}


def model(name: str) -> torch.nn.Module:
    with torch.device("meta"):
        return MODELS[name]()


@pytest.mark.parametrize("name", ["gpt2", "opt"])
def test_a_table_of_positions_ends_and_that_is_reported_before_the_weights_load(name: str) -> None:
    assert check_positions(model(name), 32, "policy m") == []
    with pytest.raises(RLHFError) as error:
        check_positions(model(name), 33, "policy m")
    assert str(error.value) == (
        "policy m has 32 positions but rows of up to 33 tokens; set data.max_tokens to 32 "
        "(data.too_long drops or cuts longer rows)"
    )


def test_computed_positions_continue_and_a_line_says_so() -> None:
    assert check_positions(model("llama"), 32, "policy m") == []
    assert check_positions(model("llama"), 33, "policy m") == [
        "positions  policy m has 32 positions but rows of up to 33 tokens: tokens past "
        "position 32 are outside the model's context and train poorly"
    ]


def test_an_embedding_of_tokens_under_an_adapter_is_no_table_of_positions() -> None:
    reach = {"max_position_embeddings": SMALL["vocab_size"]}
    llama = LlamaForCausalLM(LlamaConfig(**SMALL, **reach, intermediate_size=16))
    adapted = get_peft_model(
        llama, LoraConfig(target_modules=["q_proj"], modules_to_save=["embed_tokens"])
    )
    assert position_table(adapted) is None
