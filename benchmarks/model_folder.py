"""Make a model folder without weights: a shape of the Qwen2.5 family or of a hybrid one, and a
byte-level tokenizer trained on given rows.

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
)

DENSE = {  # hidden, intermediate, layers, heads, KV heads, tied embeddings, as published
    "tiny": (64, 128, 2, 4, 2, True),
    "0.5b": (896, 4864, 24, 14, 2, True),
    "1.5b": (1536, 8960, 28, 12, 2, True),
    "7b": (3584, 18944, 28, 28, 4, False),
}
VOCABULARY = 151_936
HYBRID: dict[str, tuple[Any, dict[str, Any]]] = {
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
        | {"layer_types": [*["mamba"] * 9, "attention"] * 4},
    ),
}
"""Shapes of layers that take turns with attention, with a vocabulary of their own."""
SHAPES = (*DENSE, *HYBRID)
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
CHATML = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n"
    "{% if message.role == 'assistant' %}{% generation %}{{ message.content }}<|im_end|>"
    "{% endgeneration %}{% else %}{{ message.content }}<|im_end|>{% endif %}\n{% endfor %}"
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
    tokenizer.save_pretrained(folder)
    ends = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    if shape in HYBRID:
        kind, sizes = HYBRID[shape]
        kind(
            **sizes, **ends, max_position_embeddings=32_768, tie_word_embeddings=True
        ).save_pretrained(folder)
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
