"""Fused layers: RMS norms and experts by our kernels and gated activations by the Triton kernels of
Liger (arXiv 2410.10989), in any family, and the rotary embedding by Liger or by a kernel of ours.

Liger's own functions patch a family's Python module, so that every model in the process changes.
Here only one model changes, except for the rotary embedding, which is a function of that module.
"""

import inspect
import sys
from collections.abc import Callable
from functools import partial
from importlib.metadata import version
from typing import Any

import torch
from torch import Tensor, nn

from rlhf.engine import fused_on, replace_forward, replaced_forward
from rlhf.errors import RLHFError
from rlhf_kernels.experts import fuse_experts
from rlhf_kernels.gates import Product, activation_of, factors, gates_of, output_of
from rlhf_kernels.liger import liger_module
from rlhf_kernels.meta import MetaGate
from rlhf_kernels.norms import fuse_norms
from rlhf_kernels.rotary import Rotation, formula_of

FAMILIES = (
    "gemma", "gemma2", "gemma3_text", "granite", "llama", "mistral", "olmo2", "phi3", "qwen2",
    "qwen3", "qwen3_moe", "qwen3_vl_text", "smollm3",
)  # fmt: skip
"""`model_type`s whose rotary embedding is Liger's, which rotates queries and keys in place: all
fused layers of these are compared with their own (`tests/test_fused_cuda.py`)."""
ACTIVATIONS = {False: ("silu", "swish"), True: ("gelu_pytorch_tanh",)}
"""What Liger's gates compute, in the Gemma families (True) and in all others. Liger does not check
a config's activation."""
ROTARY = "apply_rotary_pos_emb"
"""Name of the rotary embedding in a family's module."""


def check_fusible(config: Any, kernels: str, device: torch.device) -> None:
    """Raise RLHFError if `model.kernels` is `liger` and a model of transformers' `config` cannot
    run Liger's kernels on `device`."""
    problem = not_fusible(config.get_text_config(), device)
    if kernels == "liger" and problem:
        raise RLHFError(f"model.kernels liger {problem}; set model.kernels to auto")


def check_gates_known(config: Any, recompute: str) -> None:
    """Raise RLHFError if `model.recompute` is `selective` and the gated layers of transformers'
    `config` are not known."""
    family = config.get_text_config().model_type
    if recompute == "selective" and family not in FAMILIES:
        raise RLHFError(
            f"model.recompute selective does not support the family {family} (supported: "
            f"{', '.join(FAMILIES)}); set model.recompute to full"
        )


def fuse(decoder: Any, kernels: str, device: torch.device) -> str:
    """Fuse the layers of a transformers decoder in place as `model.kernels` says. Return one line
    on what was fused; empty if there is nothing to report."""
    if kernels == "none" or not fused_on(device.type):
        return ""
    gates = sum(_fuse_gate(layer, device) for layer in gates_of(decoder))
    by_liger = not not_fusible(decoder.config, device)
    rotary = _fuse_rotary(decoder, device, by_liger=by_liger)
    experts = fuse_experts(decoder)
    fused = {"norms": fuse_norms(decoder), "rotary embedding": rotary, "gates": gates}
    fused |= {"experts": experts}
    *others, last = [name for name, number in fused.items() if number] or [""]
    names = f"{', '.join(others)} and {last}" if others else last
    by = f", by Liger {version('liger-kernel')} and our own kernels" if by_liger or gates else ""
    return f"layers     {names} fused{by}" if names else ""


def not_fusible(config: Any, device: torch.device) -> str:
    """Return why a model of transformers' `config` does not run Liger's kernels on `device`; empty
    if it does."""
    if not fused_on(device.type):
        return f"needs a CUDA device with Triton, but this run is on {device.type}"
    if config.model_type not in FAMILIES:
        return f"does not support the family {config.model_type} (supported: {', '.join(FAMILIES)})"
    activation = getattr(config, "hidden_activation", None) or config.hidden_act
    if activation not in ACTIVATIONS[config.model_type.startswith("gemma")]:
        return f"has no gates with the activation {activation}"
    return ""


def _fuse_gate(layer: Any, device: torch.device) -> bool:
    """Have a gated layer run a fused product, if a kernel computes it; return whether one does."""
    product = product_of(layer, device)
    if product is not None:
        replace_forward(layer, partial(_gated, layer, product=product))
    return product is not None


def _gated(layer: Any, hidden: Tensor, *, product: Product) -> Tensor:
    return output_of(layer, product(*factors(layer, hidden)))


def product_of(layer: Any, device: torch.device) -> Product | None:
    """Return the fused product of a gated layer; None if no kernel computes it. On the meta device
    it is a stand-in, which needs no values."""
    activation = activation_of(layer)
    if not activation or device.type == "meta":
        return MetaGate.apply if activation else None
    if activation == "gelu":
        return liger_module("geglu").LigerGELUMulFunction.apply
    return liger_module("swiglu").LigerSiLUMulFunction.apply


def _fuse_rotary(decoder: Any, device: torch.device, *, by_liger: bool) -> bool:
    """Replace the rotary embedding in the family's module, by Liger's or by ours if a kernel
    computes it; return whether one does."""
    family = vars(sys.modules[type(decoder).__module__])
    own = family.get(ROTARY)
    own = own.original if isinstance(own, Rotary) else own
    if own is None or not calls_rotary(decoder):
        return False
    if not (by_liger or formula_of(own, 8, 4) or formula_of(own, 8, 8)):
        return False
    if device.type != "meta":
        family[ROTARY] = Rotary(_rotary_of_liger() if by_liger else Rotation(own), own)
    return True


def calls_rotary(decoder: nn.Module) -> bool:
    """Return whether a decoder's layers call the function `ROTARY` of their family; those of
    DeepSeek V3 call another one unless its config says otherwise."""
    config: Any = decoder.config
    if getattr(config, "rope_interleave", False):
        return False
    kinds = {type(part) for part in decoder.modules()}
    members = [each for kind in kinds for each in vars(kind).values() if inspect.isfunction(each)]
    return any(ROTARY in inspect.unwrap(each).__code__.co_names for each in members)


def _rotary_of_liger() -> Callable[..., Any]:
    return partial(_rotate, liger_module("rope").LigerRopeFunction.apply)


def _rotate(
    fused: Callable[..., Any],
    query: Tensor, key: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Rotate queries [1, heads, T, C] and keys with `fused`, Liger's Triton kernel. Liger's own
    dispatcher may select a CuTe DSL kernel instead, which is compiled for each row length."""
    rotated: tuple[Tensor, Tensor] = fused(query, key, cos, sin, None, unsqueeze_dim)
    return rotated


class Rotary:
    """A family's rotary embedding: `fused` for CUDA tensors, the family's own for all others."""

    def __init__(self, fused: Callable[..., Any], original: Callable[..., Any]) -> None:
        self.fused = fused
        self.original: Callable[..., Any] = (
            original.original if isinstance(original, Rotary) else original
        )

    def __call__(self, query: Tensor, *rest: Any, **options: Any) -> Any:
        # torch.compile fuses the family's own function itself.
        fits = query.device.type == "cuda" and not torch.compiler.is_compiling()
        chosen = self.fused if fits else self.original
        return chosen(query, *rest, **options)


def products_of(decoder: nn.Module, device: torch.device) -> dict[int, Product]:
    """Return the products of the decoder's fused gated layers, by the layers' ids."""
    fused = [layer for layer in gates_of(decoder) if replaced_forward(layer) is not None]
    products = {id(layer): product_of(layer, device) for layer in fused}
    return {number: product for number, product in products.items() if product is not None}
