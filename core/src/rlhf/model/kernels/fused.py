"""Fused layers: RMS norms by our kernels in any family, rotary embedding and gated activations by
the Triton kernels of Liger (arXiv 2410.10989), an optional dependency.

Liger knows how each family gates. Its patches of a family's Python module are taken back, so that
they reach one model: others in the process, and those without values, stay as they are.
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

from rlhf.engine import fused_on
from rlhf.errors import RLHFError
from rlhf.model.kernels.gates import Product, factors, gates_of
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
"""What Liger's gates compute, in the Gemma families and in all others; it does not look."""
LEAST = "0.8.5"
ROTARY = "apply_rotary_pos_emb"
INSTALL = "pip install 'rlhf-core[kernels]'"


def check_fusible(config: Any, asked: str, device: torch.device) -> None:
    """Raises RLHFError where `model.kernels` asks for what a model of transformers' `config` cannot
    have on `device`."""
    problem = not_fusible(config.get_text_config(), asked, device)
    if asked == "liger" and problem:
        joint = ", or" if INSTALL in problem else ":"
        raise RLHFError(f"model.kernels liger {problem}{joint} set model.kernels to auto")


def check_forgettable(config: Any, asked: str) -> None:
    """Raises RLHFError where `model.recompute` is selective and the gated layers of transformers'
    `config` are not known."""
    family = config.get_text_config().model_type
    if asked == "selective" and family not in FAMILIES:
        raise RLHFError(
            f"model.recompute selective does not know the family {family}, only "
            f"{', '.join(FAMILIES)}: set model.recompute to full"
        )


def fuse(decoder: Any, asked: str, device: torch.device) -> str:
    """Fuse the layers of a transformers decoder in place as `model.kernels` asks for; what came of
    it, in words, or nothing where there is nothing to tell."""
    if asked == "none" or not fused_on(device.type):
        return ""
    norms = "norms fused" if fuse_norms(decoder) else ""
    problem = not_fusible(decoder.config, asked, device)
    if problem:
        more = f"rotary embedding and gates not: {problem}" if INSTALL in problem else ""
        said = "; ".join(part for part in (norms, more) if part)
        return f"layers     {said}" if said else ""
    _patch(decoder)
    if device.type == "meta":
        _without_values(decoder)
    said = "norms, rotary embedding and gates" if norms else "rotary embedding and gates"
    return f"layers     {said} fused, by Liger {version('liger-kernel')} and own kernels"


def not_fusible(config: Any, asked: str, device: torch.device) -> str:
    """Why a model of transformers' `config` runs its own layers on `device`, or nothing."""
    if asked == "none":
        return "was not asked for"
    if not fused_on(device.type):
        return f"needs a CUDA device with Triton, and this run is on {device.type}"
    if config.model_type not in FAMILIES:
        return f"does not know the family {config.model_type}, only {', '.join(FAMILIES)}"
    activation = getattr(config, "hidden_activation", None) or config.hidden_act
    if activation not in ACTIVATIONS[config.model_type.startswith("gemma")]:
        return f"has no gates with the activation {activation}"
    try:
        found = version("liger-kernel")
    except PackageNotFoundError:
        return f"needs liger-kernel: {INSTALL}"
    if Version(found) < Version(LEAST):
        return f"needs liger-kernel {LEAST}, and {found} is installed: {INSTALL}"
    return ""


def _patch(decoder: Any) -> None:
    """Liger's own patch of one model, with the family's module left as it was but for the rotary
    embedding, which is a function there."""
    # It would warn of every backend that is for other hardware.
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
    """A family's rotary embedding: Liger's for tensors that its kernel can read, the family's own
    for all others."""

    def __init__(self, fused: Callable[..., Any], own: Callable[..., Any]) -> None:
        self.fused = fused
        self.own: Callable[..., Any] = own.own if isinstance(own, Rotary) else own

    def __call__(self, query: Tensor, *rest: Any, **options: Any) -> Any:
        # A compiler fuses the family's own by itself.
        fits = query.device.type == "cuda" and not torch.compiler.is_compiling()
        chosen = self.fused if fits else self.own
        return chosen(query, *rest, **options)


def products_of(decoder: nn.Module) -> dict[int, Product]:
    """The fused products of the decoder's gated layers, by the layers' ids."""
    forwards = {
        id(layer): getattr(vars(layer).get("forward"), "__func__", None)
        for layer in gates_of(decoder)
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
        _unseen_gate: UnseenGate.apply,
    }
    return {id_: products[forward] for id_, forward in forwards.items() if forward in products}


def _without_values(decoder: nn.Module) -> None:
    """Stand-ins for the kernels on the meta device, which keep and give what these do."""
    for layer in gates_of(decoder):
        if "forward" in vars(layer):
            layer.__dict__["forward"] = _unseen_gate.__get__(layer)


def _unseen_gate(layer: Any, hidden: Tensor) -> Tensor:
    return layer.down_proj(UnseenGate.apply(*factors(layer, hidden)))


class UnseenGate(torch.autograd.Function):
    """A gated activation without values: it keeps both inputs, and writes their gradients there."""

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        ctx.save_for_backward(gate, up)
        return torch.empty_like(up)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        gate, up = ctx.saved_tensors
        return gate, up
