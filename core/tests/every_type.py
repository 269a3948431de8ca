"""Every causal language model of the installed transformers, and every model that reads images and
writes text, as a tiny random model, and what the project does with it. `python
core/tests/every_type.py` writes docs/families.md."""

import contextlib
import tempfile
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import transformers
from attrs import frozen
from engines import BareEngine
from small_models import config_of, empty, load
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
)

from rlhf.config.sections import LoraConfig
from rlhf.data.batch import PackedBatch
from rlhf.engine import Mesh
from rlhf.errors import RLHFError, first_line
from rlhf.model.packed import PackedModel
from rlhf.model.probe import AttentionPath, choose_path, placeholders
from rlhf.model.save import check_exportable, verify_export
from rlhf.readouts import token_logprobs
from rlhf_devkit.families import tree_batch

PAGE = Path(__file__).parents[2] / "docs" / "families.md"
WHOLE = tuple(MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES)
"""Types that also read images."""
TEXT = tuple(name for name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES if name not in WHOLE)
MOST_PARAMETERS = 50_000_000
MOST_ERROR = 5e-5
"""Of a log-probability in float32."""

SIZES: dict[str, Any] = {
    # The width of the model, its layers and heads, under all of their names.
    **dict.fromkeys(("hidden_size", "n_embd", "d_model", "emb_dim", "embedding_size"), 64),
    **dict.fromkeys(("word_embed_proj_dim", "lru_width", "attention_hidden_size"), 64),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers"), 2),
    **dict.fromkeys(("decoder_layers", "encoder_layers"), 2),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads"), 4),
    **dict.fromkeys(("decoder_attention_heads", "encoder_attention_heads"), 4),
    **dict.fromkeys(("swa_num_attention_heads", "linear_num_value_heads", "linear_num_heads"), 4),
    **dict.fromkeys(("num_key_value_heads", "swa_num_key_value_heads"), 2),
    **dict.fromkeys(("linear_num_key_heads", "num_global_key_value_heads"), 2),
    **dict.fromkeys(("head_dim", "swa_head_dim", "swa_v_head_dim", "v_head_dim"), 16),
    **dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim", "linear_head_dim"), 16),
    **dict.fromkeys(("global_head_dim", "index_head_dim", "mamba_head_dim", "kv_lora_rank"), 16),
    **dict.fromkeys(("intermediate_size", "ffn_hidden_size", "intermediate_size_mlp"), 96),
    **dict.fromkeys(("decoder_ffn_dim", "encoder_ffn_dim", "ffn_dim", "d_ff"), 96),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len"), 512),
    "context_length": 512,
    "vocab_size": 96,
    "vocab_size_per_layer_input": 96,
    "initializer_range": 0.1,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 1,
    "is_decoder": True,
    # Experts.
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "num_experts_per_token", "top_k", "top_k_experts"), 2),
    **dict.fromkeys(("moe_topk", "moe_top_k"), 2),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size"), 32),
    **dict.fromkeys(("moe_shared_expert_intermediate_size", "shared_intermediate_size"), 32),
    "expert_ffn_hidden_size": 32,
    **dict.fromkeys(("n_shared_experts", "num_shared_experts", "n_group", "topk_group"), 1),
    **dict.fromkeys(("num_expert_group", "first_k_dense_replace"), 1),
    # Windows and latent attention.
    **dict.fromkeys(("sliding_window", "sliding_window_size", "attention_chunk_size"), 8),
    "attention_window_size": 8,
    **dict.fromkeys(("qk_rope_head_dim", "qk_nope_head_dim", "rotary_dim", "d_rel"), 8),
    **dict.fromkeys(("laurel_rank", "adapter_rank"), 8),
    "q_lora_rank": 32,
    "index_topk": 512,
    "index_n_heads": 2,
    "rel_extent": 16,
    "hidden_size_per_layer_input": 16,
    "router_hidden_size": 16,
    # Recurrent layers.
    **dict.fromkeys(("mamba_n_heads", "n_mamba_heads", "mamba_dt_rank"), 4),
    **dict.fromkeys(("mamba_n_groups", "mamba_ngroups"), 1),
    **dict.fromkeys(("mamba_d_state", "ssm_state_size", "state_size"), 16),
    **dict.fromkeys(("mamba_chunk_size", "chunk_size"), 16),
    "mamba_d_head": 32,
    "mamba_d_ssm": 128,
    "mamba_num_heads": 8,
}
TOWER: dict[str, Any] = {
    **dict.fromkeys(("hidden_size", "embed_dim", "d_model", "embedding_dim", "width"), 32),
    **dict.fromkeys(("num_hidden_layers", "depth", "num_layers", "encoder_layers", "layers"), 1),
    **dict.fromkeys(("num_attention_heads", "num_heads", "attention_heads", "heads"), 2),
    **dict.fromkeys(("intermediate_size", "mlp_dim", "ffn_dim", "projection_dim"), 32),
    **dict.fromkeys(("image_size", "img_size", "num_position_embeddings"), 16),
    **dict.fromkeys(("out_hidden_size", "text_hidden_size", "output_dim"), 64),
    "patch_size": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "num_channels": 3,
    "base_channels": 32,
    "vocab_size": 96,
}
"""Sizes of what reads images and sounds."""
TEXT_PARTS = ("text", "decoder", "language", "llm")
OPTIONAL = (
    "num_experts", "sliding_window", "q_lora_rank", "top_k_experts", "moe_intermediate_size",
    "num_global_key_value_heads", "attention_chunk_size",
)  # fmt: skip
"""Fields that are off where they are None by default."""
FOUR = {"num_hidden_layers": 4}
LATENT = {"num_key_value_heads": 4, "num_hidden_layers": 3}
UNPADDED = {"unpadded_vocab_size": 96, "num_hidden_layers": 3}
IMAGE = {"vocabulary_map": {"<image>": 95}}
ROPE = {"rope_type": "default", "rope_theta": 1e4}
MROPE = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [4, 2, 2]}}
MORE: dict[str, dict[str, Any]] = {
    **dict.fromkeys(("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text", "olmo_hybrid"), FOUR),
    **dict.fromkeys(("lfm3", "exaone4", "smollm3", "olmo3"), FOUR),
    **dict.fromkeys(("deepseek_v32", "glm_moe_dsa", "glm4_moe_lite", "hy_v4", "axk2"), LATENT),
    **dict.fromkeys(("longcat_flash", "youtu"), LATENT | {"num_hidden_layers": 2, "head_dim": 8}),
    **dict.fromkeys(("deepseek_v3", "axk1"), LATENT | {"head_dim": 8}),
    **dict.fromkeys(
        ("kimi_linear", "bailing_hybrid"),
        LATENT | FOUR | {"layer_types": ["linear_attention", "full_attention"] * 2},
    ),
    **dict.fromkeys(
        ("inkling_text", "inkling2_text", "inkling2_loop_text"),
        UNPADDED,
    ),
    "dots3_note_text": {"num_key_value_heads": 4},
    "cohere_compass_text": {"layer_types": ["sliding_attention", "full_attention"]}
    | {"rope_parameters": dict.fromkeys(("sliding_attention", "full_attention"), ROPE)},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]], "window_size": 8},
    "deepseek_v4": FOUR
    | {"num_key_value_heads": 1, "o_groups": 2, "o_lora_rank": 16, "hc_mult": 2}
    | {"layer_types": ["heavily_compressed_attention", "compressed_sparse_attention"] * 2}
    | {"mlp_layer_types": ["hash_moe", "moe", "moe", "moe"], "compress_ratio": 4},
    "qwen4_exp_text": FOUR
    | {"hc_lowrank": 16, "ngram_vocab_size_base": 500, "ple_embed_dim": 16}
    | {"heads_per_ngram": 2, "split_ngram_parts": 2, "indexer_n_heads": 2}
    | {"indexer_kv_heads": 1, "indexer_head_dim": 16, "indexer_budget": 16}
    | {"indexer_compress_ratio": 4},
    "zamba": {"num_hidden_layers": 6, "attn_layer_period": 3, "attn_layer_offset": 1}
    | {"use_mamba_kernels": False, "attention_head_dim": 32, "attention_hidden_size": 128},
    "zamba2": FOUR
    | {"layers_block_type": ["mamba", "hybrid"] * 2, "hybrid_layer_ids": [1, 3]}
    | {"use_mamba_kernels": False, "mamba_headdim": 32, "attention_hidden_size": 128}
    | {"attention_head_dim": 32, "num_query_groups": 4, "kv_channels": 16}
    | {"num_key_value_heads": 4, "add_bias_linear": False},
    "lfm2": FOUR | {"layer_types": ["conv", "full_attention"] * 2},
    "lfm2_moe": FOUR | {"layer_types": ["conv", "full_attention"] * 2, "num_dense_layers": 1},
    "gemma2": {"attn_logit_softcapping": 1.0, "final_logit_softcapping": 3.0},
    "gemma3_text": {"num_hidden_layers": 6},
    "gemma3n_text": {"num_hidden_layers": 10, "num_kv_shared_layers": 5, "intermediate_size": 96}
    | {"activation_sparsity_pattern": None, "layer_types": None},
    "gemma4_text": {"num_hidden_layers": 12, "num_kv_shared_layers": 6}
    | {"layer_types": ["sliding_attention", "sliding_attention", "full_attention"] * 4},
    "gemma4_unified_text": {"num_hidden_layers": 6},
    "llama4_text": FOUR | {"num_experts_per_tok": 1},
    "minimax": {"block_size": 16},
    "bamba": FOUR | {"attn_layer_indices": [1, 3]},
    "jamba": FOUR
    | {"attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 2}
    | {"expert_layer_offset": 1, "use_mamba_kernels": False},
    "mamba2": {"num_heads": 8, "head_dim": 16, "n_groups": 1, "expand": 2},
    "granitemoehybrid": FOUR | {"layer_types": ["mamba", "attention"] * 2},
    "recurrent_gemma": {"num_hidden_layers": 3},
    "nemotron_h": FOUR
    | {"layers_block_type": ["mamba", "attention", "mamba", "moe"], "n_groups": 1}
    | {"moe_latent_size": None, "mamba_head_dim": 16},
    "phi3": {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}},
    "gpt_oss": {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}},
    "deepseek_v2": {"head_dim": 8},
    "zaya": {"num_experts_per_tok": 1},
    "xlstm": {"embedding_dim": 64, "num_blocks": 2},
    "chameleon": IMAGE,
    "emu3": IMAGE,
    **dict.fromkeys(
        ("qwen2_vl_text", "qwen2_5_vl_text", "qwen2_5_omni_text", "paddleocr_vl_text"), MROPE
    ),
    **dict.fromkeys(("glm4v_text", "glm46v_text", "glm_ocr_text", "glmga_text"), MROPE),
    "glm4v_moe_text": {"rope_parameters": MROPE["rope_parameters"] | {"mrope_section": [2, 1, 1]}},
    "cosmos3_edge_text": MROPE,
    "hunyuan_vl_text": MROPE,
    "hy_v4_vl_text": {"rope_parameters": ROPE | {"mrope_section": [2, 1, 1]}},
    "ernie4_5_vl_moe_text": {"rope_parameters": ROPE | {"mrope_section": [3, 3, 2]}},
    "deepseek_ocr2_text": {"mlp_layer_types": ["dense", "sparse"]},
    "diffusion_gemma_text": {"num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 32},
    "muse_spark_audio": {"patch_sizes": [4, 2], "hidden_sizes": [16, 32], "depths": [1, 1]}
    | {"num_hidden_layers": 2},
    "radio": {"video_temporal_patch_size": 2},
    "step3p5": {"sliding_window": 8},
    "mistral_large4_text": {"num_key_value_heads": 4, "head_dim": 8},
    "glm5_next_text": LATENT | {"qk_rope_head_dim": 0, "head_dim": 8},
    "molmo2_adapter": {"vision_feature_layer": [0, -1]},
    "dbrx": {"attn_config": {"rope_theta": 1e4, "kv_n_heads": 2, "clip_qkv": 8.0}}
    | {"ffn_config": {"ffn_hidden_size": 96, "moe_num_experts": 4, "moe_top_k": 2}},
    "granite4_vision": {"deepstack_layer_map": [[-1, 0]], "downsample_rate": "1/2"}
    | {"vision_config": TOWER | {"model_type": "clip_vision_model", "hidden_size": 64}},
    "muse_spark": {"out_hidden_size": 64, "projector_hidden_size": 64},
    "dots3_note_vision_encoder": {"per_layer_config": {}, "mlp_layer_types": ["dense"]}
    | {"adapter_in_dim": 32, "adapter_out_dim": 64},
    "dots3_note_audio_encoder": {"adapter_input_size": 32, "adapter_output_size": 64},
    "apertus1p5": {"image_token_id": 90, "audio_token_id": 91}
    | {"image_token_offset": 100, "audio_token_offset": 150},
    "apertus1p5_text": {"vocab_size": 200},
    "apertus1p5_vision_tokenizer": {"codebook_size": 50},
    "wavtokenizer_encoder": {"codebook_dim": 32, "codebook_size": 50},
    "modernbert-decoder": {"num_hidden_layers": 3, "local_attention": 16}
    | {"cls_token_id": 1, "sep_token_id": 2},
}


class NotBuilt(Exception):
    """No tiny model of a type could be made; says why."""


@frozen(kw_only=True)
class Result:
    """What the project does with one type."""

    path: str
    reason: str = ""
    """Why it is not `tree`, or why the type is refused."""
    error: float = 0.0
    """Largest error of a log-probability against transformers' own."""
    answers: tuple[str, ...] = ("", "", "")
    """Whether it trains in bf16 and with LoRA, and whether its export is opened again; or why
    not."""


def small_config(kind: Any, sizes: Mapping[str, Any], more: Mapping[str, Any]) -> Any:
    """Return a config of a class with these sizes, also in its parts."""
    try:
        default: dict[str, Any] = vars(kind())
    except Exception:  # Not every config has defaults.
        default = {}
    known = {*default, *getattr(kind, "__dataclass_fields__", ()), *kind.attribute_map}
    given = {name: value for name, value in sizes.items() if name in known}
    given = {n: v for n, v in given.items() if n not in OPTIONAL or default.get(n) is not None}
    for name, value in default.items():
        if "drop" in name and isinstance(value, float):
            given[name] = 0.0
        elif name in given and isinstance(value, list | tuple):
            given[name] = type(value)([given[name]] * len(value))
    for name in kind.sub_configs:
        if (part := default.get(name)) is not None:
            reads_text = any(word in name for word in TEXT_PARTS)
            options = MORE.get(part.model_type, {})
            small = small_config(type(part), SIZES if reads_text else TOWER, options)
            given[name] = small.to_dict() | {"model_type": part.model_type}
    if kind.sub_configs:
        tokens = ("token_id", "token_index")
        placed = (n for n, v in default.items() if n.endswith(tokens) and isinstance(v, int))
        given |= dict.fromkeys((name for name in placed if default[name] > 95), 95)
    return kind(**given | more)


def tiny_model(model_type: str) -> Any:
    """Return a random model. Raises NotBuilt."""
    auto: Any = transformers.AutoModelForCausalLM
    if model_type in WHOLE:
        auto = transformers.AutoModelForImageTextToText
    try:
        config = small_config(CONFIG_MAPPING[model_type], SIZES, MORE.get(model_type, {}))
        with torch.device("meta"):
            size = auto.from_config(config).num_parameters()
        if size > MOST_PARAMETERS:
            raise NotBuilt(f"its sizes have other names ({size:,} parameters)")
        torch.manual_seed(0)
        causal = auto.from_config(config, dtype=torch.float32)
    except NotBuilt:
        raise
    except Exception as error:  # A family's own code may raise anything.
        raise NotBuilt(f"{type(error).__name__}: {first_line(error)}") from error
    for parameter in causal.parameters():
        parameter.data += 0.1 * torch.randn_like(parameter)
    return causal.eval()


def result_of(model_type: str) -> Result:
    """Return what the project does with a type. Raises NotBuilt, and what must not be raised."""
    causal = tiny_model(model_type)
    with tempfile.TemporaryDirectory() as folder:
        check_saved(causal, folder)
        try:
            module, choice = opened(folder, "fp32")
        except RLHFError as error:
            return Result(path="refused", reason=str(error).replace(folder, "MODEL"))
        found, truth = logprobs(module), logprobs(module, "separate")
        return Result(
            path=choice.path,
            reason=choice.reason,
            error=float((found - truth).abs().max()),
            answers=(
                training(folder, "bf16"),
                training(folder, "fp32", lora=LoraConfig(rank=2)),
                exporting(module, type(causal), truth),
            ),
        )


def check_saved(causal: Any, folder: str) -> None:
    """Save a model in a folder. Raises NotBuilt if transformers does not open it again."""
    try:
        causal.save_pretrained(folder)
        _, report = type(causal).from_pretrained(folder, output_loading_info=True)
    except Exception as error:  # A family's own code may raise anything.
        raise NotBuilt(f"{type(error).__name__}: {first_line(error)}") from error
    if report["missing_keys"]:
        raise NotBuilt("transformers does not open what it has saved")


def opened(folder: str, precision: Any, **sections: Any) -> tuple[PackedModel, AttentionPath]:
    """Return the model in a folder as a run has it, and its path."""
    config = config_of(folder, model={"dtype": precision}, **sections)
    check_exportable(empty(config).model)
    module = load(config, precision=precision)
    return module, choose_path(BareEngine(module, precision), Mesh())  # type: ignore[arg-type]


def text_batch(module: PackedModel) -> PackedBatch:
    """Return trees without tokens that stand for images and sounds."""
    batch = tree_batch()
    for placeholder in placeholders(module.causal.config):
        for tokens in (batch.tokens, batch.predict):
            tokens[tokens == placeholder] = 5
    return batch


@torch.no_grad()
def logprobs(module: PackedModel, path: Any = None) -> torch.Tensor:
    """Return the log-probabilities of the batch on a path, by default the one that is set."""
    module.path = path or module.path
    return module(text_batch(module), token_logprobs)["logprobs"]


def training(folder: str, precision: Any, **sections: Any) -> str:
    """Return "yes" if a step of training runs, or else why it is refused."""
    try:
        module, _ = opened(folder, precision, **sections)
    except RLHFError as error:
        return str(error).replace(folder, "MODEL")
    module.train()
    module(text_batch(module), token_logprobs)["logprobs"].sum().backward()
    return "yes"


def exporting(module: PackedModel, kind: Any, truth: torch.Tensor) -> str:
    """Return "yes" if transformers opens the export as the model that was trained."""
    with tempfile.TemporaryDirectory() as folder:
        module.save_weights(module.state_dict(), Path(folder))
        verify_export(Path(folder), module.model)
        plain, report = kind.from_pretrained(folder, output_loading_info=True)
    assert not report["missing_keys"], report["missing_keys"]
    assert not report["unexpected_keys"], report["unexpected_keys"]
    again = PackedModel(plain.eval())
    again.form = module.form
    torch.testing.assert_close(logprobs(again, "separate"), truth)
    return "yes"


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Hide what transformers and peft print."""
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def rows() -> Iterator[str]:
    """Yield the lines of docs/families.md."""
    yield "# Every family"
    yield ""
    yield f"What a run does with each type of transformers {transformers.__version__}, on tiny"
    yield "random models. `python core/tests/every_type.py` writes this page; the matrix of tests"
    yield "compares it. The batch has prompts with several answers. `error` is the largest error of"
    yield "a log-probability against the model's own, one path at a time. An export is opened again"
    yield "by transformers. What is not tried has sizes of other names, needs a library that is not"
    yield "installed, or its code fails."
    for title, types in (("Causal types", TEXT), ("Types that also read images", WHOLE)):
        yield ""
        yield f"## {title}"
        yield ""
        yield "| type | path | error | bf16 | LoRA | export | reason |"
        yield "|---|---|---|---|---|---|---|"
        yield from map(row_of, types)


def row_of(model_type: str) -> str:
    """Return the row of a type. Raises what must not be raised."""
    try:
        found = result_of(model_type)
    except NotBuilt as problem:
        return f"| {model_type} | not tried | | | | | {problem} |"
    assert found.error < MOST_ERROR, f"{model_type} on {found.path}: {found.error:.0e}"
    cells = [answer if answer in ("yes", "") else "no" for answer in found.answers]
    reasons = [found.reason, *(answer for answer in found.answers if answer not in ("yes", ""))]
    error = "" if found.path == "refused" else f"{found.error:.0e}"
    reason = "; ".join(filter(None, reasons)).replace("|", "\\|")
    return f"| {model_type} | {found.path} | {error} | {' | '.join(cells)} | {reason} |"


if __name__ == "__main__":
    with quiet():
        PAGE.write_text("\n".join(rows()) + "\n", encoding="utf-8")
