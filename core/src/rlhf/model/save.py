"""A model folder that plain transformers or peft opens, and the proof that it is whole."""

import copy
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel
from peft.utils import get_peft_model_state_dict
from safetensors import SafetensorError, safe_open
from torch import Tensor
from transformers import GenerationConfig
from transformers.core_model_loading import revert_weight_conversion

from rlhf.errors import RLHFError
from rlhf.model.packed import PackedModel
from rlhf.model.task import label_head

PREFIX = "model."
"""Where the wrapped model stands in a PackedModel's state dict."""


def save_model(module: PackedModel, weights: Mapping[str, Tensor], directory: Path) -> None:
    """Write the model in the Hugging Face layout, or its adapter alone where it has one.

    `weights` is the full state dict on the host, of the PackedModel or of the model in it; with an
    adapter, the adapter's own suffice. transformers' and peft's own writers undo merged expert
    weights. Each is written in the dtype that the module holds it in; at ZeRO-3 `module` has no
    values, and none are asked of it.
    """
    own = module.model.state_dict()
    wrapped = weights.keys() <= {PREFIX + name for name in own}
    state = {}
    for name, value in weights.items():
        inner = name.removeprefix(PREFIX) if wrapped else name
        assert inner in own, f"{inner} is no weight of {type(module.causal).__name__}"
        state[inner] = value.to(own[inner].dtype)
    if isinstance(module.model, PeftModel):
        # True or False keeps peft from asking the hub whether the vocabulary has changed.
        module.model.save_pretrained(
            str(directory), state_dict=state, save_embedding_layers=has_adapted_embeddings(module)
        )
    else:
        module.causal.save_pretrained(directory, state_dict=without_tied(module.causal, state))


def has_adapted_embeddings(module: PackedModel) -> bool:
    """Whether the adapter changes the input embeddings, which are then saved with it."""
    return hasattr(module.causal.get_input_embeddings(), "base_layer")


def without_tied(causal: Any, state: dict[str, Any]) -> dict[str, Any]:
    """A state dict in which a weight with several names has the one that transformers reads."""
    tied: Mapping[str, str] = causal.all_tied_weights_keys
    return {
        name: value
        for name, value in state.items()
        if tied.get(name, name) not in state or name not in tied
    }


def save_tokenizer_and_config(
    module: PackedModel, tokenizer: Any, directory: Path, more: Mapping[str, Any] | None = None
) -> None:
    """Write the tokenizer with its chat template, and beside the weights or the adapter what says
    how to use them.

    For a language model that is the generation config, whose EOS ends the trained turn (`rlhf
    merge` passes it on). A classifier's config.json names a padding token that ends no answer:
    transformers scores the last token that is not padding. `more` goes into config.json.
    """
    classifies = label_head(module.causal) is not None
    if classifies:
        text = module.causal.config.get_text_config()
        tokenizer = with_padding(tokenizer, text.vocab_size)
        text.pad_token_id = tokenizer.pad_token_id
    tokenizer.save_pretrained(directory)
    for name, value in (more or {}).items():
        setattr(module.causal.config, name, value)
    if classifies or more:
        module.causal.config.architectures = [type(module.causal).__name__]
        module.causal.config.save_pretrained(directory)
    if not classifies:
        save_generation(module, tokenizer, directory)


def save_generation(module: PackedModel, tokenizer: Any, directory: Path) -> None:
    """Write the generation config."""
    generation = GenerationConfig.from_dict(module.causal.generation_config.to_dict())
    ends = end_tokens(tokenizer)
    if ends:
        generation.eos_token_id = ends if len(ends) > 1 else ends[0]
    if tokenizer.pad_token_id is not None:
        generation.pad_token_id = tokenizer.pad_token_id
    generation.save_pretrained(directory)


def with_padding(tokenizer: Any, num_embeddings: int) -> Any:
    """A copy of the tokenizer whose padding token ends no answer: its own if it does not, else a
    new one where the embedding has a row for it, else its unknown or first token, else the byte 0.
    """
    tokenizer = copy.deepcopy(tokenizer)
    ends = end_tokens(tokenizer)
    if tokenizer.pad_token_id is not None and tokenizer.pad_token_id not in ends:
        return tokenizer
    if len(tokenizer) < num_embeddings:
        tokenizer.add_special_tokens({"pad_token": PADDING})
        return tokenizer
    spare = [tokenizer.unk_token, tokenizer.bos_token, *BYTE_ZERO]
    known = tokenizer.get_vocab()
    for token in spare:
        if token in known and known[token] not in ends:
            tokenizer.pad_token = token
            return tokenizer
    raise RLHFError(
        f"the tokenizer's only padding token {tokenizer.pad_token or tokenizer.eos_token!r} ends "
        "answers, and the embedding has no row for another: set pad_token in its "
        "tokenizer_config.json to a token that no answer ends with"
    )


PADDING = "<|pad|>"
"""The padding token that a tokenizer gets which has none of its own."""

BYTE_ZERO = ("<0x00>", "\u0100")
"""The byte 0 in vocabularies of SentencePiece and of byte-level BPE: no text ends with it."""


def end_tokens(tokenizer: Any) -> list[int]:
    """The tokens that end an answer: what the chat template puts after an assistant's words, where
    that is a special token, and the tokenizer's EOS."""
    ends = [turn_end(tokenizer), tokenizer.eos_token_id]
    return list(dict.fromkeys(end for end in ends if end is not None))


def turn_end(tokenizer: Any) -> int | None:
    """The first special token after the assistant's words in the rendered template."""
    if getattr(tokenizer, "chat_template", None) is None:
        return None
    words = "qwxz"
    turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": words}]
    text = tokenizer.apply_chat_template(turns, tokenize=False)
    _, _, after = text.rpartition(words)
    special = set(tokenizer.all_special_ids) | set(tokenizer.added_tokens_decoder)
    tokens = tokenizer(after, add_special_tokens=False)["input_ids"]
    return next((token for token in tokens if token in special), None)


def verify_export(directory: Path, module: PackedModel) -> None:
    """Re-open the safetensors files in `directory` and compare names and shapes with the module's.

    Raises RLHFError for a file that does not open and a weight that is missing, too many, or of
    another shape. At ZeRO-3 the shapes are those before sharding.
    """
    found: dict[str, tuple[int, ...]] = {}
    for file in sorted(directory.glob("*.safetensors")):
        try:
            with safe_open(file, framework="pt") as weights:
                for name in weights.keys():  # noqa: SIM118 (no mapping)
                    found[name] = tuple(weights.get_slice(name).get_shape())
        except (SafetensorError, OSError) as error:
            raise RLHFError(f"the exported file {file} does not open again: {error}") from error
    expected = exported_shapes(module)
    for name in sorted(expected.keys() | found.keys()):
        if expected.get(name) != found.get(name):
            raise RLHFError(
                f"the export in {directory} is not whole: {name} is {shown(found.get(name))} and "
                f"must be "
                f"{shown(expected.get(name))}; the checkpoint is untouched, run rlhf export on it"
            )


def shown(shape: tuple[int, ...] | None) -> str:
    """A shape in an error text."""
    return "absent" if shape is None else str(list(shape))


def exported_shapes(module: PackedModel) -> dict[str, tuple[int, ...]]:
    """Name and shape of every tensor that an export must hold, by the writers' own renaming."""
    shapes = {
        name: getattr(value, "ds_shape", value.shape)
        for name, value in module.model.state_dict(keep_vars=True).items()
    }
    state = {name: torch.empty(tuple(shape), device="meta") for name, shape in shapes.items()}
    if isinstance(module.model, PeftModel):
        state = get_peft_model_state_dict(
            module.model, state_dict=state, save_embedding_layers=has_adapted_embeddings(module)
        )
    else:
        state = without_tied(module.causal, state)
        for name in module.causal._keys_to_ignore_on_save or ():
            state.pop(name, None)
        state = revert_weight_conversion(module.causal, state)
    return {name: tuple(value.shape) for name, value in state.items()}
