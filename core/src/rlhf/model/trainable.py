"""Which parameters of a model are trained: adapters, freezing, 4-bit bases, the groups of the
optimizer; and recomputation."""

import difflib
import fnmatch
from collections import defaultdict
from collections.abc import Collection
from typing import Any

import torch
from torch import nn
from transformers import BitsAndBytesConfig

from rlhf.config.sections import Config, OptimConfig
from rlhf.errors import RLHFError
from rlhf.model.parts import beyond_text, outside, unwrapped
from rlhf.model.task import Task
from rlhf.sharding import whole_shape

NORMS = (nn.LayerNorm, nn.GroupNorm, nn.RMSNorm, nn.modules.batchnorm._BatchNorm)
"""torch's own normalisation modules."""


def prepare_trainable(
    causal: Any, config: Config, task: Task, *, images: bool = False
) -> nn.Module:
    """Return the model with adapters, frozen parameters and recomputation as configured, for data
    with or without images; with an adapter it is wrapped by peft."""
    if config.model.quantize is not None and causal.device.type != "meta":
        causal.requires_grad_(False)  # Only adapters, which are added later, are trained.
    freeze_parts(causal, trained_parts(config, images=images))
    model = causal
    if config.lora is not None or config.model.adapter is not None:
        from rlhf.model.adapters import with_adapter  # late: start-up time

        model = with_adapter(causal, config, task)
    freeze(model, config.model.freeze)
    if config.model.recompute == "full":
        recompute(causal)
    return model


def trained_parts(config: Config, *, images: bool = True) -> tuple[str, ...]:
    """Return the parts of a model that are trained: on images `model.train` or its default."""
    if not images:
        return ("language",)
    if config.model.train is not None:
        return config.model.train
    adapted = config.lora is not None or config.model.adapter is not None
    return ("language",) if adapted else ("language", "projector")


def raise_if_rate_of_frozen(config: Config, *, images: bool) -> None:
    """Raise RLHFError if a part that is not trained has a learning rate."""
    parts = trained_parts(config, images=images)
    for part in config.optim.part_lr:
        if part not in parts:
            raise RLHFError(
                f"optim.part_lr has a rate of {part}, which is frozen here; remove it, or add "
                f"{part} to model.train and rows with images to data.train"
            )


def freeze_parts(causal: Any, trained: Collection[str]) -> None:
    """Freeze what belongs to no part in `trained`. A classifier's head is always trained."""
    for module in outside(causal, trained):
        for parameter in module.parameters(recurse=False):  # BLIP-2 itself is such a module.
            parameter.requires_grad_(False)


def freeze(model: nn.Module, patterns: tuple[str, ...]) -> None:
    """Freeze every parameter whose name matches one of the shell patterns."""
    named = dict(model.named_parameters(remove_duplicate=False))
    for pattern in patterns:
        matches = fnmatch.filter(named, pattern)
        if not matches:
            near = difflib.get_close_matches(pattern, named, n=3, cutoff=0.0)
            raise RLHFError(
                f"model.freeze pattern {pattern} matches no parameter; similar names: "
                f"{', '.join(near)}"
            )
        for name in matches:
            named[name].requires_grad_(False)
    if not any(parameter.requires_grad for parameter in named.values()):
        raise RLHFError(
            f"model.freeze {', '.join(patterns)} leaves nothing to train; freeze fewer parameters"
        )


def recompute(causal: Any) -> None:
    """Keep only each layer's input and compute the layer again in backward."""
    # transformers 5.17 has only the second name.
    enable = getattr(causal, "activation_checkpointing_enable", None)
    (enable or causal.gradient_checkpointing_enable)({"use_reentrant": False})
    if not causal.get_input_embeddings().weight.requires_grad:
        causal.enable_input_require_grads()


def parameter_groups(module: nn.Module, optim: OptimConfig) -> list[dict[str, Any]]:
    """Return the trained parameters in groups for the optimizer: `{"params": [...],
    "weight_decay": float, "lr": float}`.

    Only matrices outside of norms decay. Norm weights, biases and all parameters that were created
    with fewer than two dimensions do not. A group has one dtype, of which float32 comes last, and
    belongs to one part of those with a rate of their own; the others come first.
    """
    parts = _parts_of(module, optim.part_lr)
    decayed: dict[nn.Parameter, bool] = {}
    for owner in module.modules():
        # Families name their own RMS norm classes `...Norm`.
        is_norm = isinstance(owner, NORMS) or type(owner).__name__.endswith("Norm")
        for name, parameter in owner.named_parameters(recurse=False):
            if not parameter.requires_grad:
                continue
            # At ZeRO-3 the parameter itself is flat.
            matrix = len(whole_shape(parameter)) >= 2
            decayed.setdefault(parameter, matrix and not is_norm and not name.endswith("bias"))
    groups = defaultdict[tuple[str, int, bool], list[nn.Parameter]](list)
    for parameter, decays in decayed.items():
        part = parts.get(parameter, "")
        groups[part, parameter.dtype.itemsize, not decays].append(parameter)
    return [
        {
            "params": groups[part, size, fixed],
            "weight_decay": 0.0 if fixed else optim.weight_decay,
            "lr": optim.part_lr.get(part, optim.lr),
        }
        for part, size, fixed in sorted(groups)
    ]


def _parts_of(module: nn.Module, parts: Collection[str]) -> dict[nn.Parameter, str]:
    """Return to which of some `parts` beyond text the parameters of a model belong."""
    whole: Any = module
    causal = unwrapped(whole.causal) if parts else None
    return {
        parameter: part
        for part in parts
        for owner in {*beyond_text(causal)} - {*beyond_text(causal, without=[part])}
        for parameter in owner.parameters(recurse=False)
    }


def four_bits(config: Config, dtype: torch.dtype, device: torch.device) -> Any:
    """Return transformers' settings for an NF4 base (QLoRA, arXiv 2305.14314)."""
    if config.lora is None and config.model.adapter is None:
        raise RLHFError("model.quantize nf4 freezes the whole model; add lora to train an adapter")
    if device.type != "cuda":
        raise RLHFError(
            f"model.quantize nf4 needs a CUDA device; this run is on {device.type}, so remove "
            "model.quantize"
        )
    try:
        import bitsandbytes  # noqa: F401
    except ImportError as error:
        raise RLHFError(
            "model.quantize nf4 needs bitsandbytes: pip install 'rlhf-core[quantize]'"
        ) from error
    return BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=dtype,
    )
