"""Tiny random models of every family of docs/models.md and what the probe chooses for them."""

from functools import cache
from typing import Any

import torch
import transformers
from attrs import frozen
from engines import BareEngine
from packaging.version import Version
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from rlhf.engine import Mesh
from rlhf.model.packed import PackedModel
from rlhf.model.probe import AttentionPath, choose_path
from rlhf.model.tokenizer import CHATML
from rlhf_devkit.families import FAMILIES

NAMES = tuple(name for name, (config, _) in FAMILIES.items() if hasattr(transformers, config))
# GPT-J can run another attention since transformers 5.24.
OWN_ATTENTION = () if Version(transformers.__version__) >= Version("5.24") else ("GPT-J",)
PADDED = ("GLM 5", "RecurrentGemma", "Inkling", *OWN_ATTENTION)
TREES = tuple(name for name in NAMES if name not in PADDED)


@frozen
class Family:
    """A tiny model of a family, and what the probe chose for it."""

    module: PackedModel
    choice: AttentionPath


def random_model(name: str) -> Any:
    """A tiny transformers model of a family, the same in every call."""
    config_class, options = FAMILIES[name]
    torch.manual_seed(0)
    config = getattr(transformers, config_class)(**options)
    causal = transformers.AutoModelForCausalLM.from_config(config)
    for parameter in causal.parameters():
        # Biases, norms and sinks start at 0 and 1, where a wrong use of them does not show.
        parameter.data += 0.1 * torch.randn_like(parameter)
    return causal.eval()


@cache
def family(name: str) -> Family:
    module = PackedModel(random_model(name))
    return Family(module, choose_path(BareEngine(module), Mesh()))  # type: ignore[arg-type]


def on_cuda(name: str, dtype: torch.dtype) -> PackedModel:
    return PackedModel(random_model(name).to("cuda", dtype))


def chatml_tokenizer(template: str | None = CHATML, **options: Any) -> Any:
    """A tokenizer of five words whose turns end with `<|im_end|>`."""
    words = {"a": 0, "<eos>": 1, "<|im_end|>": 2, "<|im_start|>": 3, "<pad>": 4}
    words_only = Tokenizer(models.WordLevel(words, unk_token="a"))
    words_only.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=words_only,
        eos_token="<eos>",
        pad_token="<pad>",
        additional_special_tokens=["<|im_start|>", "<|im_end|>"],
        **options,
    )
    tokenizer.chat_template = template
    return tokenizer
