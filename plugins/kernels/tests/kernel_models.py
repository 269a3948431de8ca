"""Tiny random models whose layers kernels change, and batches for them."""

from collections.abc import Iterable
from typing import Any

import torch
import transformers
from attrs import evolve
from torch import Tensor
from transformers.masking_utils import (
    chunked_causal_mask_function,
    sliding_window_causal_mask_function,
)

from rlhf.data.batch import PackedBatch
from rlhf.data.example import Answer, Example
from rlhf.data.packing import blank_batch, pack
from rlhf.kernels import TreeMask
from rlhf.model.packed import PackedModel

KINDS: dict[str, Any] = {
    "full": None,
    "sliding": sliding_window_causal_mask_function(6),
    "wide": sliding_window_causal_mask_function(150),
    "chunked": chunked_causal_mask_function(8, torch.zeros(1, dtype=torch.long)),
}

WINDOW = 8
VOCABULARY = 96

SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
    "max_position_embeddings": 256,
    "initializer_range": 0.2,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
OLD_SIZES = {
    "vocab_size": VOCABULARY,
    "n_positions": 256,
    "n_embd": 32,
    "n_layer": 2,
    "n_head": 4,
    "initializer_range": 0.2,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "resid_pdrop": 0.0,
    "embd_pdrop": 0.0,
    "attn_pdrop": 0.0,
}
EXPERTS = {"num_experts_per_tok": 2, "num_local_experts": 4}
MIXED = {"sliding_window": WINDOW, "layer_types": ["sliding_attention", "full_attention"]}

FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "Llama": ("LlamaConfig", SIZES),
    "Qwen2": ("Qwen2Config", SIZES | {"use_sliding_window": True, "max_window_layers": 1} | MIXED),
    "Qwen3": ("Qwen3Config", SIZES | {"head_dim": 8}),
    "Mistral": ("MistralConfig", SIZES | {"sliding_window": WINDOW}),
    "Mixtral": ("MixtralConfig", SIZES | EXPERTS | {"sliding_window": WINDOW}),
    "Gemma 2": (
        "Gemma2Config",
        SIZES
        | MIXED
        | {"head_dim": 8, "final_logit_softcapping": 3.0}
        | {"attn_logit_softcapping": 1.0},
    ),
    "Gemma 3": ("Gemma3TextConfig", SIZES | MIXED | {"head_dim": 8}),
    "Phi-3": ("Phi3Config", SIZES | {"sliding_window": WINDOW, "resid_pdrop": 0.0}),
    "GPT-OSS": (
        "GptOssConfig",
        SIZES
        | MIXED
        | EXPERTS
        | {"head_dim": 8, "rope_parameters": {"rope_theta": 1e4, "rope_type": "default"}},
    ),
    "Granite": ("GraniteConfig", SIZES | {"logits_scaling": 4.0}),
    "GPT-2": ("GPT2Config", OLD_SIZES),
    "LFM2": ("Lfm2Config", SIZES | {"layer_types": ["conv", "full_attention"]}),
}


def tree_batch() -> PackedBatch:
    """Three trees, longer than the window, one of them a chain; every answer token is predicted."""
    spans = ((13, (11, 9)), (0, (12,)), (5, (6, 3, 7)))
    total = 80
    tokens = torch.randint(3, VOCABULARY, (total,), generator=torch.Generator().manual_seed(1))
    batch = blank_batch(tokens, spans)
    places, answers, start, number = [], [], 0, 0
    for prompt, lengths in spans:
        place = start + prompt
        for length in lengths:
            for index in range(length):
                before = place + index - 1 if index else start + prompt - 1
                if before >= start:
                    places.append((before, place + index))
                    answers.append(number)
            place, number = place + length, number + 1
        start = place
    before, at = torch.tensor(places).T
    answer = torch.tensor(answers)
    return evolve(batch, predict_from=before, predict_at=at, predict=tokens[at], answer=answer)


def llama(**more: Any) -> PackedModel:
    """A Llama of three layers."""
    torch.manual_seed(0)
    sizes = SIZES | {"num_hidden_layers": 3} | more
    return PackedModel(
        transformers.AutoModelForCausalLM.from_config(transformers.LlamaConfig(**sizes))
    )


def row(*lengths: int) -> PackedBatch:
    """Chains of these lengths in one row of whole blocks."""
    examples = [Example([], [Answer([1 + k % 90 for k in range(n)])]) for n in lengths]
    return pack(examples, range(len(examples)), round_to=128)


def gradients(causal: Any) -> dict[str, Tensor]:
    found = {name: p.grad for name, p in causal.named_parameters() if p.grad is not None}
    causal.zero_grad(set_to_none=True)
    return found


class Shards:
    """A backend that has sharded these parameters."""

    def __init__(self, parameters: Iterable[Tensor]) -> None:
        self.shapes = {parameter: parameter.shape for parameter in parameters}
        self.parts = {parameter: torch.ones(3) for parameter in self.shapes}

    def whole_shape(self, parameter: Tensor) -> torch.Size | None:
        return self.shapes.get(parameter)

    def shards(self, parameter: Tensor) -> list[Tensor]:
        return [self.parts[parameter]] if parameter in self.parts else []


def batch_of(spans: Any, multiple: int = 128) -> PackedBatch:
    total = sum(prompt + sum(answers) for prompt, answers in spans) or 1
    total = -(-total // multiple) * multiple
    generator = torch.Generator().manual_seed(0)
    return blank_batch(torch.randint(0, 50, (total,), generator=generator), spans)


def whole(mask: TreeMask) -> Tensor:
    """Which tokens see which [T, T]."""
    row = torch.arange(len(mask.tree.owner), device=mask.tree.owner.device)
    return mask.visible(row[:, None], row[None, :])
