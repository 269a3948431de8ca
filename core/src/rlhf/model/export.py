"""A model folder that plain transformers or peft opens, and the proof that it is whole."""

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


def save_tokenizer_and_generation(module: PackedModel, tokenizer: Any, directory: Path) -> None:
    """Write the tokenizer with its chat template, and the generation config whose EOS ends the
    trained turn (beside an adapter too: `rlhf merge` passes it on)."""
    tokenizer.save_pretrained(directory)
    generation = GenerationConfig.from_dict(module.causal.generation_config.to_dict())
    ends = end_tokens(tokenizer)
    if ends:
        generation.eos_token_id = ends if len(ends) > 1 else ends[0]
    if tokenizer.pad_token_id is not None:
        generation.pad_token_id = tokenizer.pad_token_id
    generation.save_pretrained(directory)


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
