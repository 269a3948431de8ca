"""Products of compiled layers in FP8 through torchao (Micikevicius et al., arXiv 2209.05433).

Weights, inputs and gradients are scaled again in each product; the weights themselves stay as they
are.
"""

import weakref
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch
from packaging.version import Version
from torch import Tensor, nn

from rlhf.engine import replace_forward
from rlhf.errors import RLHFError
from rlhf_kernels.meta import MetaGatedNorm, MetaNorm, MetaProduct

FP8_CAPABILITY = {"tensorwise": (8, 9), "rowwise": (9, 0)}
"""Lowest compute capability for a value of `model.fp8`."""
INSTALL = "pip install 'rlhf-kernels"
FP8_MULTIPLE = 16
"""Both sizes of a product in FP8 are multiples of this; other products stay as they are."""


def check_fp8(recipe: str, device: torch.device) -> None:
    """Raise RLHFError if `device` or the installed torchao cannot compute products by `recipe`."""
    capability, needed = torch.cuda.get_device_capability(device), FP8_CAPABILITY[recipe]
    if capability < needed:
        raise RLHFError(
            f"model.fp8 {recipe} needs compute capability {needed[0]}.{needed[1]}, but this "
            f"device has {capability[0]}.{capability[1]}; remove model.fp8"
        )
    problem = lacks("torchao", "0.18", extra="fp8")
    if problem:
        raise RLHFError(f"model.fp8 {recipe} {problem}")


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


def to_fp8(layers: nn.ModuleList, recipe: str, *, emulate: bool = False) -> int:
    """Turn the layers' linear modules into torchao's in place and return how many.

    `emulate` computes with rounded values in a higher precision, on any device.
    """
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    settings = Float8LinearConfig.from_recipe_name(recipe)
    if emulate:
        object.__setattr__(settings, "emulate", True)
    chosen = set(fp8_products(layers))
    convert_to_float8_training(
        layers, config=settings, module_filter_fn=lambda module, name: module in chosen
    )
    return len(chosen)


def fp8_products(layers: nn.ModuleList) -> list[nn.Module]:
    """Return the layers' linear modules with sizes that FP8 supports, without the factors of
    adapters, whose products are small."""
    named = layers.named_modules()
    return [module for name, module in named if fits_fp8(module) and ".lora_" not in name]


def fits_fp8(module: nn.Module) -> bool:
    """Return whether a module is a product with sizes that FP8 supports."""
    if not isinstance(module, nn.Linear):
        return False
    return module.in_features % FP8_MULTIPLE == module.out_features % FP8_MULTIPLE == 0


def rehearse_fp8(layers: nn.ModuleList) -> None:
    """Replace the layers' products by stand-ins on the meta device.

    Of a normed input one byte per number is kept, once for all products that read it for the
    gradient of their weight. Other inputs are cast again in backward from what attention and gates
    keep.
    """
    # The last input, by a weak reference, and what is kept of it.
    latest: dict[str, Any] = {"input": lambda: None}

    def forward(linear: Any, hidden: Tensor) -> Tensor:
        trained = linear.weight.requires_grad
        if trained and latest["input"]() is not hidden:
            # A gated norm returns a view of its rows, as its layer does.
            gated = hidden if hidden._base is None else hidden._base
            normed = isinstance(hidden.grad_fn, MetaNorm._backward_cls) or isinstance(
                gated.grad_fn, MetaGatedNorm._backward_cls
            )
            kept = torch.empty(hidden.shape, dtype=torch.float8_e4m3fn, device=hidden.device)
            latest.update(input=weakref.ref(hidden), kept=kept if normed else None)
        return MetaProduct.apply(hidden, linear.weight, latest["kept"] if trained else None)

    for module in fp8_products(layers):
        replace_forward(module, forward.__get__(module))
