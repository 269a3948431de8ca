"""Make a model folder without weights: a shape of the Qwen2.5 family, of a hybrid model, a mixture
of experts or a model that reads images, and a byte-level tokenizer trained on given rows.

    python benchmarks/model_folder.py FOLDER --shape 1.5b --rows chats.jsonl.gz

With `model.init: random` a run builds the weights from it, so that speed is measured without any
download.
"""

import argparse
import gzip
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    GraniteMoeHybridConfig,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen3_5TextConfig,
    Qwen3Config,
    Qwen3MoeConfig,
    Qwen3VLConfig,
)

DENSE = {  # hidden, intermediate, layers, heads, KV heads, tied embeddings, as published
    "tiny": (64, 128, 2, 4, 2, True),
    "0.5b": (896, 4864, 24, 14, 2, True),
    "1.5b": (1536, 8960, 28, 12, 2, True),
    "7b": (3584, 18944, 28, 28, 4, False),
}
VOCABULARY = 151_936
OTHERS: dict[str, tuple[Any, dict[str, Any]]] = {
    "qwen3.5-2b": (
        Qwen3_5TextConfig,
        {"vocab_size": 248_320, "hidden_size": 2048, "intermediate_size": 6144}
        | {"num_hidden_layers": 24, "num_attention_heads": 8, "num_key_value_heads": 2}
        | {"head_dim": 256, "linear_num_key_heads": 16, "linear_num_value_heads": 16}
        | {"linear_key_head_dim": 128, "linear_value_head_dim": 128},
    ),
    "granite-4-3b": (
        GraniteMoeHybridConfig,
        {"vocab_size": 100_352, "hidden_size": 2048, "intermediate_size": 8192}
        | {"shared_intermediate_size": 8192, "num_hidden_layers": 40, "num_local_experts": 0}
        | {"num_experts_per_tok": 0, "num_attention_heads": 32, "num_key_value_heads": 8}
        | {"mamba_n_heads": 64, "mamba_d_head": 64, "mamba_d_state": 128, "mamba_n_groups": 1}
        | {"mamba_chunk_size": 256, "position_embedding_type": "nope"}
        | {"layer_types": [*["mamba"] * 9, "attention"] * 4}
        # It has no experts, for which TRL would compute a loss of routers.
        | {"router_aux_loss_coef": 0.0},
    ),
    "qwen3-30b-a3b-cut": (
        Qwen3MoeConfig,
        {"vocab_size": VOCABULARY, "hidden_size": 2048, "intermediate_size": 6144}
        | {"num_hidden_layers": 8, "num_attention_heads": 32, "num_key_value_heads": 4}
        | {"head_dim": 128, "num_experts": 128, "num_experts_per_tok": 8}
        | {"moe_intermediate_size": 768, "norm_topk_prob": True, "tie_word_embeddings": False},
    ),
    "qwen3-3b-cut": (
        Qwen3Config,
        {"vocab_size": VOCABULARY, "hidden_size": 2048, "intermediate_size": 6144}
        | {"num_hidden_layers": 8, "num_attention_heads": 32, "num_key_value_heads": 4}
        | {"head_dim": 128, "tie_word_embeddings": False},
    ),
}
"""Shapes of other families: layers that take turns with attention, a mixture of experts with 8 of
its 48 layers, so that it fits on one card, and the dense model of the parameters that a token
passes in that mixture."""
VISION: dict[str, dict[str, Any]] = {
    "qwen3-vl-2b": {
        "text_config": {"vocab_size": VOCABULARY, "hidden_size": 2048, "intermediate_size": 6144}
        | {"num_hidden_layers": 28, "num_attention_heads": 16, "num_key_value_heads": 8}
        | {"head_dim": 128, "max_position_embeddings": 32_768, "tie_word_embeddings": True}
        | {"rope_parameters": {"rope_type": "default", "mrope_section": [24, 20, 20]}},
        "vision_config": {"depth": 24, "hidden_size": 1024, "intermediate_size": 4096}
        | {"num_heads": 16, "out_hidden_size": 2048, "deepstack_visual_indexes": [5, 11, 17]},
    },
    "qwen3-vl-tiny": {
        "text_config": {"vocab_size": 32_000, "hidden_size": 64, "intermediate_size": 128}
        | {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
        | {"head_dim": 16, "max_position_embeddings": 32_768, "tie_word_embeddings": True}
        | {"rope_parameters": {"rope_type": "default", "mrope_section": [2, 3, 3]}},
        "vision_config": {"depth": 2, "hidden_size": 64, "intermediate_size": 128}
        | {"num_heads": 4, "out_hidden_size": 64, "deepstack_visual_indexes": [0]},
    },
}
"""Shapes of Qwen3-VL, whose patches have 16 pixels a side and are merged two by two."""
SHAPES = (*DENSE, *OTHERS, *VISION)
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
OF_IMAGES = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
PROCESSOR = {
    "image_processor_type": "Qwen2VLImageProcessor", "patch_size": 16, "merge_size": 2,
    "temporal_patch_size": 2, "size": {"shortest_edge": 65_536, "longest_edge": 16_777_216},
    "image_mean": [0.5, 0.5, 0.5], "image_std": [0.5, 0.5, 0.5],
}  # fmt: skip
CHATML = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n"
    "{% if message.role == 'assistant' %}{% generation %}{{ message.content }}<|im_end|>"
    "{% endgeneration %}{% else %}{{ message.content }}<|im_end|>{% endif %}\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
CHATML_OF_PARTS = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n"
    "{% if message.content is string %}{{ message.content }}{% else %}"
    "{% for part in message.content %}{% if part.type == 'image' %}"
    "<|vision_start|><|image_pad|><|vision_end|>{% else %}{{ part.text }}{% endif %}{% endfor %}"
    "{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def make(folder: Path, *, shape: str, rows: Path, vocabulary: int = VOCABULARY) -> None:
    """Write config.json and the tokenizer. The vocabulary of the head is `vocabulary` whatever the
    tokenizer's is: the head costs what it costs in the family."""
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=_train(rows),
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        model_max_length=32_768,
    )
    tokenizer.chat_template = CHATML
    if shape in VISION:
        tokenizer.chat_template = CHATML_OF_PARTS
        tokenizer.add_tokens(list(OF_IMAGES), special_tokens=True)
    tokenizer.save_pretrained(folder)
    ends = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    if shape in OTHERS:
        kind, sizes = OTHERS[shape]
        common = {"max_position_embeddings": 32_768, "tie_word_embeddings": True} | ends
        kind(**common | sizes).save_pretrained(folder)
        return
    if shape in VISION:
        (folder / "preprocessor_config.json").write_text(json.dumps(PROCESSOR))
        (folder / "processor_config.json").write_text("{}")
        start, end, image, video = tokenizer.convert_tokens_to_ids(list(OF_IMAGES))
        parts = {name: dict(part) for name, part in VISION[shape].items()}
        parts["text_config"] |= ends
        Qwen3VLConfig(
            **parts, **ends, vision_start_token_id=start, vision_end_token_id=end,
            image_token_id=image, video_token_id=video, tie_word_embeddings=True,
            architectures=["Qwen3VLForConditionalGeneration"],
        ).save_pretrained(folder)  # fmt: skip
        return
    hidden, intermediate, layers, heads, kv_heads, tied = DENSE[shape]
    Qwen2Config(
        vocab_size=vocabulary, hidden_size=hidden, intermediate_size=intermediate,
        num_hidden_layers=layers, num_attention_heads=heads, num_key_value_heads=kv_heads,
        max_position_embeddings=32_768, tie_word_embeddings=tied, **ends,
        architectures=["Qwen2ForCausalLM"],
    ).save_pretrained(folder)  # fmt: skip


def _train(rows: Path) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=32_000,
        special_tokens=list(SPECIAL),
        show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    tokenizer.train_from_iterator(_texts(rows), trainer)
    return tokenizer


def _texts(rows: Path) -> Iterator[str]:
    opened: Any = gzip.open if rows.suffix == ".gz" else open
    with opened(rows, "rt") as lines:
        for line in lines:
            yield from _strings(json.loads(line))


def _strings(value: Any) -> Iterator[str]:
    """Every piece of text in a row, however deep."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for item in value.values():
            yield from _strings(item)
    elif isinstance(value, list):
        for item in value:
            yield from _strings(item)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--shape", choices=SHAPES, default="tiny")
    parser.add_argument("--rows", type=Path, required=True)
    parser.add_argument("--vocabulary", type=int, default=VOCABULARY)
    options = parser.parse_args()
    make(options.folder, shape=options.shape, rows=options.rows, vocabulary=options.vocabulary)
