"""Fused layers: RMS norms by our kernels in any family, rotary embedding and gated activations by
the Triton kernels of Liger (arXiv 2410.10989), an optional dependency.

Liger knows how each family gates. It patches a family's Python module; we undo that, so that only
one model changes, and other models in the process stay as they are.
"""

import inspect
import logging
import sys
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch
from packaging.version import Version
from torch import Tensor, nn

from rlhf.devices import fused_on
from rlhf.errors import RLHFError
from rlhf.forwards import replace_forward, replaced_forward
from rlhf.model.kernels.gates import Product, factors, gates_of
from rlhf.model.kernels.meta import MetaGate
from rlhf.model.kernels.norms import fuse_norms

FAMILIES = (
    "gemma", "gemma2", "gemma3_text", "granite", "llama", "mistral", "olmo2", "phi3", "qwen2",
    "qwen3", "smollm3",
)  # fmt: skip
"""`model_type`s whose fused layers are compared with their own (`core/tests/test_fused_cuda.py`).
"""
WANTED = {
    "rope": True, "swiglu": True, "geglu": True,
    # Norms and the head's log-probabilities are ours.
    "rms_norm": False, "cross_entropy": False, "fused_linear_cross_entropy": False,
}  # fmt: skip
ACTIVATIONS = {False: ("silu", "swish"), True: ("gelu_pytorch_tanh",)}
"""What Liger's gates compute, in the Gemma families (True) and in all others. Liger does not check
a config's activation."""
INSTALL = "pip install 'rlhf-core"
ROTARY = "apply_rotary_pos_emb"
"""Name of the rotary embedding in a family's module."""


def check_fusible(config: Any, kernels: str, device: torch.device) -> None:
    """Raise RLHFError if `model.kernels` is `liger` and a model of transformers' `config` cannot
    run Liger's kernels on `device`."""
    problem = not_fusible(config.get_text_config(), device)
    if kernels == "liger" and problem:
        joint = ", or" if INSTALL in problem else ";"
        raise RLHFError(f"model.kernels liger {problem}{joint} set model.kernels to auto")


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
    norms = "norms fused" if fuse_norms(decoder) else ""
    problem = not_fusible(decoder.config, device)
    if problem:
        advice = f"rotary embedding and gates not: {problem}" if INSTALL in problem else ""
        parts = "; ".join(part for part in (norms, advice) if part)
        return f"layers     {parts}" if parts else ""
    _patch(decoder)
    for layer in gates_of(decoder) if device.type == "meta" else ():
        if replaced_forward(layer) is not None:
            # A stand-in needs no values.
            replace_forward(layer, _meta_gate.__get__(layer))
    parts = "norms, rotary embedding and gates" if norms else "rotary embedding and gates"
    return f"layers     {parts} fused, by Liger {version('liger-kernel')} and our own kernels"


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
    return lacks("liger-kernel", "0.8.5", extra="kernels")


def lacks(package: str, minimum: str, *, extra: str) -> str:
    """Return which version of an optional package is needed and how to install it; empty if it is
    installed."""
    install = f"{INSTALL}[{extra}]'"
    try:
        installed = version(package)
    except PackageNotFoundError:
        return f"needs {package}; {install}"
    if Version(installed) < Version(minimum):
        return f"needs {package} {minimum}, but {installed} is installed; {install}"
    return ""


def _patch(decoder: Any) -> None:
    """Apply Liger's patch to one model and restore the family's module, except for the rotary
    embedding, which is a function of that module."""
    # Liger would warn about every backend for other hardware.
    logging.getLogger("liger_kernel.backends.registry").setLevel(logging.ERROR)
    from liger_kernel.transformers.monkey_patch import MODEL_TYPE_TO_APPLY_LIGER_FN

    apply = MODEL_TYPE_TO_APPLY_LIGER_FN[decoder.config.model_type]
    known = inspect.signature(apply).parameters
    family = vars(sys.modules[type(decoder).__module__])
    before = dict(family)
    apply(**{name: on for name, on in WANTED.items() if name in known}, model=decoder)
    rotary = family.get(ROTARY)
    family.update(before)
    if rotary is not before.get(ROTARY) and rotary is not None:
        family[ROTARY] = Rotary(rotary, before[ROTARY])


class Rotary:
    """A family's rotary embedding: Liger's for CUDA tensors, the family's own for all others."""

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


def products_of(decoder: nn.Module) -> dict[int, Product]:
    """Return the fused products of the decoder's gated layers, by the layers' ids."""
    forwards = {
        id(layer): getattr(replaced_forward(layer), "__func__", None) for layer in gates_of(decoder)
    }
    if not any(forwards.values()):
        return {}
    from liger_kernel.ops import LigerGELUMulFunction, LigerSiLUMulFunction
    from liger_kernel.transformers.geglu import LigerGEGLUMLP
    from liger_kernel.transformers.swiglu import LigerPhi3SwiGLUMLP, LigerSwiGLUMLP

    products: dict[Any, Product] = {
        LigerGEGLUMLP.forward: LigerGELUMulFunction.apply,
        LigerSwiGLUMLP.forward: LigerSiLUMulFunction.apply,
        LigerPhi3SwiGLUMLP.forward: LigerSiLUMulFunction.apply,
        _meta_gate: MetaGate.apply,
    }
    return {id_: products[forward] for id_, forward in forwards.items() if forward in products}


def _meta_gate(layer: Any, hidden: Tensor) -> Tensor:
    return layer.down_proj(MetaGate.apply(*factors(layer, hidden)))
