"""Small mixtures of experts, and the row formats of the workflows that train them."""

from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoConfig,
    MixtralConfig,
    MixtralForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

FORMATS = {
    "sft": "demonstration", "dpo": "preference", "rm": "preference", "kto": "unpaired",
    "kd": "demonstration", "prm": "stepwise",
}  # fmt: skip
STACKED = "[experts.gate_up_proj, experts.down_proj]"


def write_experts(source: Path, folder: Path, family: str = "mixtral") -> Path:
    """Write a Mixtral or a Qwen3-MoE with the tokenizer of `source`."""
    dense = AutoConfig.from_pretrained(source)
    sizes: dict[str, Any] = {
        "vocab_size": dense.vocab_size, "hidden_size": 32, "intermediate_size": 48,
        "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
        "num_experts_per_tok": 2, "router_aux_loss_coef": 0.5, "pad_token_id": dense.pad_token_id,
        "bos_token_id": dense.bos_token_id, "eos_token_id": dense.eos_token_id,
        "sliding_window": None,
    }  # fmt: skip
    torch.manual_seed(0)
    model: Any
    if family == "mixtral":
        model = MixtralForCausalLM(MixtralConfig(num_local_experts=4, **sizes))
    else:
        sizes |= {"num_experts": 4, "moe_intermediate_size": 24, "head_dim": 8}
        model = Qwen3MoeForCausalLM(Qwen3MoeConfig(**sizes))
    model.save_pretrained(folder)
    for path in source.glob("token*"):
        (folder / path.name).write_bytes(path.read_bytes())
    for path in source.glob("*.jinja"):
        (folder / path.name).write_bytes(path.read_bytes())
    return folder
