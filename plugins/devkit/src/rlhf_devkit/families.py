"""Tiny random models of many families, and packed batches for them."""

from typing import Any

import torch
import transformers
from attrs import evolve
from torch import Tensor

from rlhf.data.batch import PackedBatch
from rlhf.data.example import Answer, Example
from rlhf.data.packing import blank_batch, pack
from rlhf.model.packed import PackedModel

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
MAMBA = (
    SIZES
    | EXPERTS
    | {"shared_intermediate_size": 16, "mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 8}
    | {"mamba_n_groups": 1, "mamba_chunk_size": 16}
)
DELTA = (
    SIZES
    | {"head_dim": 8, "linear_num_key_heads": 2, "linear_num_value_heads": 4}
    | {"linear_key_head_dim": 8, "linear_value_head_dim": 8}
    | {"layer_types": ["linear_attention", "full_attention"]}
)
LATENT = (
    SIZES
    | {"num_key_value_heads": 4, "kv_lora_rank": 8, "q_lora_rank": 16, "qk_nope_head_dim": 4}
    | {"qk_rope_head_dim": 4, "v_head_dim": 8, "moe_intermediate_size": 16}
    | {"n_routed_experts": 4, "n_shared_experts": 1, "n_group": 1, "topk_group": 1}
    | {"num_experts_per_tok": 2, "first_k_dense_replace": 1}
)

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
    "Cohere 2": ("Cohere2Config", SIZES | MIXED),
    "Llama 4": (
        "Llama4TextConfig",
        SIZES
        | {"head_dim": 8, "attention_chunk_size": WINDOW, "intermediate_size_mlp": 48}
        | {"num_local_experts": 2, "num_experts_per_tok": 1},
    ),
    "Granite": ("GraniteConfig", SIZES | {"logits_scaling": 4.0}),
    "Phi": ("PhiConfig", SIZES | {"resid_pdrop": 0.0}),
    "GPT-2": ("GPT2Config", OLD_SIZES),
    "GPT-J": ("GPTJConfig", OLD_SIZES | {"rotary_dim": 4}),
    "Mamba 2": (
        "Mamba2Config",
        {"vocab_size": VOCABULARY, "hidden_size": 32, "num_hidden_layers": 2, "num_heads": 8}
        | {
            "head_dim": 8,
            "state_size": 8,
            "n_groups": 1,
            "chunk_size": 16,
            "initializer_range": 0.2,
        },
    ),
    "Qwen3-Next": (
        "Qwen3NextConfig",
        DELTA
        | {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
        | {"shared_expert_intermediate_size": 16},
    ),
    "Qwen3.5": ("Qwen3_5TextConfig", DELTA | {"head_dim": 16}),
    "OLMo Hybrid": (
        "OlmoHybridConfig",
        DELTA | {"linear_num_key_heads": 4, "linear_num_value_heads": 4},
    ),
    "Kimi Linear": (
        "KimiLinearConfig",
        LATENT
        | {"num_experts": 4, "num_shared_experts": 1, "num_expert_group": 1}
        | {"linear_num_heads": 4, "linear_head_dim": 8}
        | {"layer_types": ["linear_attention", "full_attention"]},
    ),
    "Bamba": ("BambaConfig", MAMBA | {"attn_layer_indices": [1]}),
    "Nemotron-H": (
        "NemotronHConfig",
        SIZES
        | {"num_hidden_layers": 3, "layers_block_type": ["mamba", "attention", "mlp"]}
        | {"mamba_num_heads": 4, "mamba_head_dim": 16, "ssm_state_size": 8, "n_groups": 1}
        | {"chunk_size": 16, "head_dim": 8},
    ),
    "Falcon-H1": ("FalconH1Config", MAMBA | {"mamba_d_ssm": 64, "head_dim": 8}),
    "Zamba2": (
        "Zamba2Config",
        SIZES
        | {"layers_block_type": ["mamba", "hybrid"], "num_key_value_heads": 4}
        | {"n_mamba_heads": 4, "mamba_headdim": 16, "mamba_d_state": 8, "mamba_ngroups": 1}
        | {"chunk_size": 16, "attention_hidden_size": 64, "attention_head_dim": 16}
        | {"num_query_groups": 4, "kv_channels": 8, "adapter_rank": 4},
    ),
    "LFM2": ("Lfm2Config", SIZES | {"layer_types": ["conv", "full_attention"]}),
    "Gemma 4": (
        "Gemma4TextConfig",
        SIZES
        | {"layer_types": ["sliding_attention", "full_attention"] * 2, "num_hidden_layers": 4}
        | {"head_dim": 8, "sliding_window": WINDOW, "vocab_size_per_layer_input": VOCABULARY}
        | {"hidden_size_per_layer_input": 8, "num_kv_shared_layers": 2},
    ),
    "Granite 4": ("GraniteMoeHybridConfig", MAMBA | {"layer_types": ["mamba", "attention"]}),
    "Granite 4, dense": (
        "GraniteMoeHybridConfig",
        MAMBA | {"layer_types": ["attention"] * 2, "num_local_experts": 0, "logits_scaling": 4.0},
    ),
    "DeepSeek V3": ("DeepseekV3Config", LATENT),
    "GLM 5": (
        "GlmMoeDsaConfig",
        LATENT | {"index_topk": 512, "index_head_dim": 8, "index_n_heads": 2},
    ),
    "Phi-3.5-MoE": ("PhimoeConfig", SIZES | EXPERTS),
    "MiniCPM 3": (
        "MiniCPM3Config",
        SIZES
        | {"num_key_value_heads": 4, "kv_lora_rank": 8, "q_lora_rank": 16, "qk_nope_head_dim": 4}
        | {"qk_rope_head_dim": 4, "v_head_dim": 8, "dim_model_base": 128},
    ),
    "RecurrentGemma": (
        "RecurrentGemmaConfig",
        SIZES | {"num_hidden_layers": 3, "lru_width": 32, "attention_window_size": WINDOW},
    ),
    "Inkling": (
        "InklingTextConfig",
        SIZES
        | {"head_dim": 8, "swa_num_attention_heads": 4, "swa_num_key_value_heads": 2}
        | {"swa_head_dim": 8, "sliding_window_size": WINDOW, "d_rel": 4, "rel_extent": 16}
        | {"moe_intermediate_size": 16, "n_routed_experts": 4, "num_experts_per_tok": 2}
        | {"n_shared_experts": 1, "unpadded_vocab_size": VOCABULARY},
    ),
}
"""Configs of transformers by family; an older transformers may lack some of the classes."""


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
