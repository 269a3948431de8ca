"""Decoder layers compiled by torch.compile, and their products in FP8 through torchao.

One compiled layer serves all layers of its kind: it is compiled for the first row it meets, and
once more with the number of blocks left open, for rows of all lengths. Products in FP8
(Micikevicius et al., arXiv 2209.05433) scale weights, inputs and gradients anew each time; the
weights themselves stay as they are.
"""

import weakref
from collections.abc import Callable
from functools import lru_cache
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch
from packaging.version import Version
from torch import Tensor, nn
from torch._functorch import config as functorch

from rlhf.config.sections import Config, ModelConfig
from rlhf.engine import fused_on
from rlhf.errors import RLHFError
from rlhf.model.attention import in_blocks, let_recompile
from rlhf.model.kernels.fused import UnseenGate
from rlhf.model.kernels.gates import forget_products, gates_of
from rlhf.model.kernels.norms import UnseenNorm, fuse_norms
from rlhf.model.masks import TreeMask

LEAST = "0.18"
INSTALL = "pip install 'rlhf-core[fp8]'"
CHIPS = {"tensorwise": (8, 9), "rowwise": (9, 0)}
"""Least compute capability for a recipe of torchao."""
MULTIPLE = 16
"""Sizes of a product in FP8 are multiples of this; another product stays as it is."""

Forward = Callable[..., Any]


def compiles(model: ModelConfig) -> bool:
    """Whether layers are compiled: products in FP8 are slow without."""
    return model.kernels == "compile" or model.fp8 is not None


def setting(model: ModelConfig) -> str:
    """What asks for compiled layers."""
    return "model.kernels compile" if model.fp8 is None else f"model.fp8 {model.fp8}"


def check_compilable(config: Config, device: torch.device) -> None:
    """Raises RLHFError where `model.kernels` or `model.fp8` asks for what `device` has not."""
    model = config.model
    if not compiles(model):
        return
    if not fused_on(device.type):
        raise RLHFError(
            f"{setting(model)} needs a CUDA device with Triton, and this run is on {device.type}: "
            f"take it out"
        )
    if model.fp8 is None:
        return
    chip, least = torch.cuda.get_device_capability(device), CHIPS[model.fp8]
    if chip < least:
        raise RLHFError(
            f"model.fp8 {model.fp8} needs compute capability {least[0]}.{least[1]}, and this "
            f"device has {chip[0]}.{chip[1]}: take it out"
        )
    try:
        found = version("torchao")
    except PackageNotFoundError as error:
        raise RLHFError(f"model.fp8 {model.fp8} needs torchao: {INSTALL}") from error
    if Version(found) < Version(LEAST):
        raise RLHFError(
            f"model.fp8 {model.fp8} needs torchao {LEAST}, and {found} is installed: {INSTALL}"
        )


def check_packed(model: ModelConfig, path: str, reason: str) -> None:
    """Raises RLHFError where compiled layers would never run, as `path` is not a packed row, for
    this `reason`."""
    if compiles(model) and path not in ("tree", "packed"):
        raise RLHFError(
            f"{setting(model)} needs packed rows, and this model runs on the path '{path}' "
            f"({reason}): take it out"
        )


def compile_layers(decoder: Any, recipe: str | None) -> str:
    """Have the layers of a transformers decoder compiled when they first meet a packed row, with
    products in FP8 by torchao's `recipe`, if there is one. What was done, in words."""
    layers = layers_of(decoder)
    said = "layers     compiled by torch.compile"
    if recipe is not None:
        num_products = to_fp8(layers, recipe)
        said += f", {num_products} products in FP8 ({recipe}) by torchao {version('torchao')}"
    # The compiler would make one slow kernel of a norm and what follows, a transposed cast say.
    if fused_on(next(decoder.parameters()).device.type):
        fuse_norms(decoder)
    for layer in layers:
        layer.__dict__["forward"] = _compiled(layer.forward)
    return said


def layers_of(decoder: Any) -> nn.ModuleList:
    """The decoder's list of layers: the one that holds the most parameters."""
    lists = [module for module in decoder.modules() if isinstance(module, nn.ModuleList)]
    return max(lists, key=lambda part: sum(item.numel() for item in part.parameters()))


def to_fp8(layers: nn.ModuleList, recipe: str, *, emulate: bool = False) -> int:
    """Turn the layers' linear modules into torchao's in place; how many. `emulate` computes with
    rounded values in a higher precision, on any device."""
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    settings = Float8LinearConfig.from_recipe_name(recipe)
    if emulate:
        object.__setattr__(settings, "emulate", True)
    chosen = [module for module in layers.modules() if fits_fp8(module)]
    convert_to_float8_training(
        layers, config=settings, module_filter_fn=lambda module, name: fits_fp8(module)
    )
    return len(chosen)


def fits_fp8(module: nn.Module) -> bool:
    """Whether a module is a product whose sizes FP8 has."""
    if not isinstance(module, nn.Linear):
        return False
    return module.in_features % MULTIPLE == module.out_features % MULTIPLE == 0


def _compiled(own: Forward) -> Forward:
    """A layer's `own` forward, compiled for packed rows."""

    def forward(hidden: Tensor, *rest: Any, **options: Any) -> Any:
        # Families differ in whether the mask has a name or a place.
        if not any(isinstance(item, TreeMask) for item in (*rest, *options.values())):
            return own(hidden, *rest, **options)
        return _compiler()(own, in_blocks(hidden, dim=1), rest, options)

    return forward


def _run(own: Forward, blocks: Tensor, rest: Any, options: Any) -> Any:
    return own(blocks.flatten(1, 2), *rest, **options)


@lru_cache
def _compiler() -> Forward:
    let_recompile()
    return torch.compile(_run, backend=_inductor)


def _inductor(graph: Any, inputs: Any) -> Any:
    """torch's compiler, free to compute again in backward what a product there reads: of a gated
    layer it keeps both factors alone, for one write more."""
    from torch._inductor.compile_fx import compile_fx

    with functorch.patch(ban_recompute_materialized_backward=False):
        return compile_fx(graph, inputs)


class UnseenProduct(torch.autograd.Function):
    """A product in FP8 without values, for a rehearsal. Of its input it keeps `kept`."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, kept: Tensor | None) -> Tensor:
        ctx.save_for_backward(weight, *([] if kept is None else [kept]))
        ctx.shape = hidden.shape
        return hidden.new_empty(*hidden.shape[:-1], len(weight))

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None]:
        weight = ctx.saved_tensors[0]
        return gradient.new_empty(ctx.shape), torch.empty_like(weight), None


def rehearse_compiled(decoder: Any, recipe: str | None, *, again: bool) -> None:
    """Stand-ins on the meta device for what a compiler makes of layers: like fused kernels, it
    keeps the inputs of norms and the factors of gates and nothing between. Layers that are computed
    `again` in backward do not keep those either."""
    if not again:
        forget_products(decoder, {id(layer): UnseenGate.apply for layer in gates_of(decoder)})
    fuse_norms(decoder)
    if recipe is not None:
        rehearse_fp8(decoder)


def rehearse_fp8(decoder: Any) -> None:
    """Stand-ins for products in FP8 on the meta device.

    Of a normed input one byte is kept for each number, once for all its products; other inputs are
    cast again in backward from what attention and gates keep.
    """
    latest: dict[str, Any] = {"input": lambda: None}

    def forward(linear: Any, hidden: Tensor) -> Tensor:
        if latest["input"]() is not hidden:
            normed = isinstance(hidden.grad_fn, UnseenNorm._backward_cls)
            kept = torch.empty(hidden.shape, dtype=torch.float8_e4m3fn, device=hidden.device)
            latest.update(input=weakref.ref(hidden), kept=kept if normed else None)
        return UnseenProduct.apply(hidden, linear.weight, latest["kept"])

    for module in layers_of(decoder).modules():
        if fits_fp8(module):
            module.__dict__["forward"] = forward.__get__(module)
