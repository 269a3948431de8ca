"""Random models of the families in use, as they are published: some also read images."""

from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, AutoTokenizer

from rlhf_devkit.families import FAMILIES

TOWER = {
    "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2,
    "num_key_value_heads": 2, "head_dim": 8, "image_size": 8, "patch_size": 4,
}  # fmt: skip
QWEN_TOWER = {
    "hidden_size": 16, "intermediate_size": 16, "depth": 1, "num_heads": 2, "patch_size": 4,
    "out_hidden_size": 32,
}  # fmt: skip
WHOLE: dict[str, tuple[str, str, dict[str, Any]]] = {
    "Qwen3.5": ("Qwen3_5Config", "Qwen3.5", {"vision_config": QWEN_TOWER}),
    "Mistral 3": (
        "Mistral3Config",
        "Mistral",
        {"vision_config": TOWER | {"model_type": "pixtral"}},
    ),
    "Gemma 4": ("Gemma4Config", "Gemma 4", {"vision_config": TOWER, "audio_config": None}),
}
"""Families that also read images: the class of the config, the family of the text, the towers."""
SMALLER = {"Gemma 4": {"global_head_dim": 16}}


def write_family(
    name: str, source: Path | str, folder: Path, *, seed: int = 0, **more: Any
) -> Path:
    """Write a random model of a family with the tokenizer of `source` and return its folder.
    `more` changes the sizes of the text."""
    tokenizer = AutoTokenizer.from_pretrained(source)
    whole, text, towers = WHOLE.get(name, ("", name, {}))
    kind, options = FAMILIES[text]
    special = ("bos_token_id", "eos_token_id", "pad_token_id")
    own = {key: len(tokenizer) for key in options if key.startswith("vocab_size")}
    own |= {key: getattr(tokenizer, key) for key in special} | SMALLER.get(text, {}) | more
    config = getattr(transformers, kind)(**options | own)
    torch.manual_seed(seed)
    if whole:
        config = getattr(transformers, whole)(text_config=config, **towers)
        model = AutoModelForImageTextToText.from_config(config)
    else:
        model = AutoModelForCausalLM.from_config(config)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder
