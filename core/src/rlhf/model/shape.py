"""What is known of a configured model before any weight is read: its shape and its positions."""

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from rlhf.engine import Mesh, ModelShape
from rlhf.errors import RLHFError
from rlhf.model.accelerated import needed_kernels
from rlhf.model.architecture import DTYPES, from_config, read_architecture
from rlhf.model.head import read_head
from rlhf.model.load import packed_model
from rlhf.model.packed import PackedModel, recurrent_layers
from rlhf.model.parts import beyond_text, decoder, layers_of, num_parameters
from rlhf.model.role import ModelSpec
from rlhf.model.sequence import check_heads

TENSOR_FAMILIES = (
    "cohere2", "gemma", "gemma2", "gemma3_text", "granite", "llama", "mistral", "olmo", "qwen2",
    "qwen3", "smollm3", "starcoder2",
)  # fmt: skip
"""`model_type`s whose layers can be divided, as tests show. transformers' plans of others divide
more than linear layers, or nobody has tried them. Models that also read images are refused, since
their `model_type` is another."""


def empty_model(
    spec: ModelSpec, mesh: Mesh, weights: Mapping[str, Tensor] | None = None
) -> PackedModel:
    """Return a model on the meta device: its parameters have shapes and no values. `weights`, by
    default those of `model.path`, decide whether its head is its embedding."""
    config, task, meta = spec.config, spec.head_task, torch.device("meta")
    architecture = read_architecture(config, task, spec.labels, weights=weights)
    dtype = DTYPES[config.model.dtype]
    with meta:
        causal = from_config(architecture, config, task, dtype=dtype)
    check_heads(architecture, mesh)
    if kernels := needed_kernels(config.model):
        kernels.rehearse(decoder(causal), config.model)
    return packed_model(causal, spec, dtype, meta, mesh.sequence)


def shape_of(module: nn.Module) -> ModelShape:
    """Return the size of a whole model, or of any module, of whose parts nothing is known."""
    trainable = sum(p.numel() for p in module.parameters() if p.requires_grad)
    if not isinstance(module, PackedModel):
        own = [item.parameters(recurse=False) for item in module.modules()]
        largest = max(sum(p.numel() for p in part) for part in own)
        return ModelShape(
            parameters=num_parameters(module), trainable=trainable, largest_layer=largest,
            hidden=0, layers=0, head=0,
        )  # fmt: skip
    causal = module.causal
    text = causal.config.get_text_config()
    most, reason = tensor_ranks(causal.config)
    layers = layers_of(decoder(causal))
    embedding = causal.get_input_embeddings().weight
    head = read_head(causal).weight
    fp32 = [item for item in module.parameters() if item.dtype == torch.float32]
    return ModelShape(
        parameters=num_parameters(module),
        trainable=trainable,
        largest_layer=max([embedding.numel(), *(num_parameters(layer) for layer in layers)]),
        hidden=text.hidden_size,
        layers=text.num_hidden_layers,
        head=head.numel(),
        fp32=sum(item.numel() for item in fp32),
        fp32_trainable=sum(item.numel() for item in fp32 if item.requires_grad),
        lookup=0 if embedding is head else embedding.numel(),
        tensor=most,
        undivided=reason,
        tower_layers=sum(
            len(module) for module in beyond_text(causal) if isinstance(module, nn.ModuleList)
        ),
        scans=num_scans(causal),
        idle=num_idle(causal),
    )


def num_scans(causal: Any) -> int:
    """Return the number of a model's layers with a recurrent scan; those of LFM2 have none."""
    text, recurrent = causal.config.get_text_config(), {*recurrent_layers(causal)} - {"conv"}
    kinds = getattr(text, "layer_types", None) or [text.model_type] * text.num_hidden_layers
    return sum(kind in recurrent for kind in kinds)


def num_idle(causal: Any) -> int:
    """Return the number of parameters of a model's experts that a token does not pass."""
    top = getattr(causal.config.get_text_config(), "num_experts_per_tok", None)
    experts = [p for name, p in causal.named_parameters() if ".experts." in name and p.dim() == 3]
    return sum(p.numel() - p[0].numel() * top for p in experts) if top else 0


def tensor_ranks(config: Any) -> tuple[int, str]:
    """Return the largest number of ranks that can divide the layers of a model by transformers'
    plan of its family, and the reason if it is 1."""
    if config.model_type not in TENSOR_FAMILIES:
        return 1, f"{config.model_type} is not among the families in docs/backends.md"
    heads, width = config.num_attention_heads, config.intermediate_size
    groups = getattr(config, "num_key_value_heads", None) or heads
    most = math.gcd(heads, groups, width)
    both = f"{heads} attention and {groups} key-value heads"
    reason = f"{both} and a feed-forward width of {width} have no common divisor but 1"
    return most, reason if most == 1 else ""


def check_positions(causal: Any, longest: int, name: str) -> list[str]:
    """Return a line for the start of the run if its rows may exceed the positions in the model's
    configuration. Raises RLHFError if positions come from a table, which ends there."""
    known = getattr(causal.config.get_text_config(), "max_position_embeddings", None)
    if known is None or longest <= known:
        return []
    what = f"{name} has {known:,} positions but rows of up to {longest:,} tokens"
    if position_table(causal):
        raise RLHFError(
            f"{what}; set data.max_tokens to {known} (data.too_long drops or cuts longer rows)"
        )
    return [
        f"positions  {what}: tokens past position {known:,} are outside the model's context and "
        "train poorly"
    ]


def position_table(causal: Any) -> int | None:
    """Return the number of positions in a model's table; None if it computes positions."""
    known = getattr(causal.config.get_text_config(), "max_position_embeddings", None)
    # An adapter keeps the embedding of tokens inside its own module.
    of_tokens = set(causal.get_input_embeddings().modules())
    tables = [part for part in causal.modules() if isinstance(part, nn.Embedding)]
    # The table has one row per position, or two more (OPT).
    sizes = [part.num_embeddings for part in tables if part not in of_tokens]
    return known if known and any(size - known in (0, 1, 2) for size in sizes) else None
