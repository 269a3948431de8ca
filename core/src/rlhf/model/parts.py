"""Parts of a transformers model: the model without its adapter, its decoder and its layers."""

import sys
from collections.abc import Collection
from inspect import signature
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from rlhf.errors import RLHFError
from rlhf.model.task import label_head, reads_images


def unwrapped(model: nn.Module) -> Any:
    """Return the transformers model without peft's wrapper; adapters are inside its layers."""
    causal: Any = model
    return causal.get_base_model() if has_adapter(model) else causal


def has_adapter(model: nn.Module) -> bool:
    """Return whether peft has wrapped `model`. Nothing is imported for that: start-up time."""
    peft = sys.modules.get("peft")
    return peft is not None and isinstance(model, peft.PeftModel)


def decoder(causal: Any) -> Any:
    """Return the part of a causal language model or classifier that ends in hidden states."""
    if reads_images(causal.config):
        # A classifier has no `get_decoder` of its own.
        text = (causal if label_head(causal) is None else causal.base_model).get_decoder()
        return text if text.get_output_embeddings() is None else decoder(text)
    if causal.base_model is not causal:
        return causal.base_model
    # Llama 4's `base_model_prefix` names no attribute of its causal LM.
    return next(child for child in causal.children() if isinstance(child, PreTrainedModel))


def output_layer(causal: Any) -> Any:
    """Return the layer that ends in the logits of text, perhaps of a language model inside of one
    that also reads images; None without one."""
    layer = causal.get_output_embeddings()
    if layer is None and reads_images(causal.config):
        layer = causal.get_decoder().get_output_embeddings()
    return layer


def image_reader(causal: Any) -> Any:
    """Return the part that computes images, places them among the embeddings of a row and ends in
    hidden states. Raises RLHFError if the head is a part of it."""
    if not reads_images(causal.config):
        return decoder(causal)
    if causal.base_model is causal:
        raise RLHFError(
            f"{type(causal).__name__} computes images and logits in one module, so it can be "
            "trained only on text; remove the images from the data, or choose another model.path"
        )
    return causal.base_model


def language_model(causal: Any) -> Any:
    """Return what computes the logits of text: the model itself, or a language model inside of one
    that also reads images (Llama 4, which fails on text alone up to transformers 5.24)."""
    if label_head(causal) is not None or not reads_images(causal.config):
        return causal
    text = causal.get_decoder()
    return causal if text.get_output_embeddings() is None else text


def beyond_text(causal: Any, *, without: Collection[str] = ()) -> list[nn.Module]:
    """Return the modules of a model that text does not reach, each without its parts: those of
    towers for images and sounds, with their projectors, `without` the parts in `model.train`. Of a
    model of text they are the parts of its decoder that are for these, as in Phi-4 Multimodal."""
    base = causal.base_model
    if not reads_images(causal.config):
        kinds = [causal.config.sub_configs.get(f"{name}_config") for name in ("vision", "audio")]
        return [
            module
            for name, part in decoder(causal).named_children()
            if name.startswith(("multi_modal", "visual"))
            or any(type(getattr(it, "config", None)) in kinds for it in part.modules())
            for module in part.modules()
        ]
    # With its head, if that is a language model of its own.
    text = (causal if label_head(causal) is None else base).get_decoder()
    reached = {*text.modules(), causal.get_input_embeddings()}
    return [
        module
        for name, module in base.named_modules()
        if module not in reached and part_of(name) not in without
    ]


def configs_of_towers(causal: Any) -> list[Any]:
    """Return the configs of vision towers that compute attention of several images in one row."""
    found = [
        module.config
        for module in beyond_text(causal)
        if hasattr(module, "config") and "cu_seqlens" in signature(module.forward).parameters
    ]
    return list({id(config): config for config in found}.values())


def outside(causal: Any, parts: Collection[str]) -> set[nn.Module]:
    """Return the modules of a model, each without its parts, that belong to none of the `parts` in
    `model.train`. A classifier's head belongs to each."""
    left = {*beyond_text(causal, without=parts)}
    if "language" not in parts:
        head = label_head(causal)
        kept = {*beyond_text(causal), *(head[1].modules() if head else ())}
        left |= {module for module in causal.modules() if module not in kept}
    return left


def part_of(name: str) -> str:
    """Return to which part of a model a module beyond text belongs, by its name in the base model:
    to `vision`, to the `projector`, which some towers end with, or to `sound`."""
    first, *rest = name.split(".")
    if any(word in first for word in ("audio", "sound", "speech")):
        return "sound"
    is_tower = "vis" in first and "proj" not in first and not first.startswith("embed_")
    return "vision" if is_tower and not any("merger" in part for part in rest) else "projector"


def layers_of(model: nn.Module) -> nn.ModuleList:
    """Return the list of decoder layers: the list that holds the most parameters."""
    lists = [module for module in model.modules() if isinstance(module, nn.ModuleList)]
    return max(lists, key=num_parameters, default=nn.ModuleList())


def num_parameters(module: nn.Module) -> int:
    """Return the number of parameters of `module`; tied ones count once."""
    return sum(parameter.numel() for parameter in module.parameters())
