"""A decoder's layers, changed as `model.kernels`, `model.fp8` and `model.recompute` say.

`rlhf.forwards` says in which order. torch.compile makes one function for all layers of a kind, with
the number of blocks left open, for rows of all lengths.
"""

from collections.abc import Callable
from functools import lru_cache
from importlib.metadata import version
from typing import Any

import torch
from torch import Tensor
from torch._functorch import config as functorch
from torch.utils._pytree import tree_leaves

from rlhf.engine import fused_on, replace_forward
from rlhf.errors import RLHFError
from rlhf.kernels import BLOCK, TreeMask, compiles, layers_of, setting
from rlhf.plugin import ModelConfig
from rlhf_kernels.compiler import let_recompile, mark_any_size
from rlhf_kernels.fp8 import check_fp8, rehearse_fp8, to_fp8
from rlhf_kernels.fused import check_fusible, check_gates_known, fuse, products_of
from rlhf_kernels.gates import gates_of, recompute_products
from rlhf_kernels.meta import MetaGate
from rlhf_kernels.norms import fuse_norms

Forward = Callable[..., Any]


def check_layers(architecture: Any, model: ModelConfig, device: torch.device) -> None:
    """Raise RLHFError if a model of transformers' `architecture` on `device` cannot run what
    `model` asks for."""
    check_fusible(architecture, model.kernels, device)
    check_gates_known(architecture, model.recompute)
    check_compilable(model, device)


def check_compilable(model: ModelConfig, device: torch.device) -> None:
    """Raise RLHFError if `device` cannot run what `model.kernels` or `model.fp8` asks for."""
    if not compiles(model):
        return
    if not fused_on(device.type):
        raise RLHFError(
            f"{setting(model)} needs a CUDA device with Triton, but this run is on {device.type}; "
            f"remove {setting(model)}"
        )
    if model.fp8 is not None:
        check_fp8(model.fp8, device)


def change_layers(decoder: Any, model: ModelConfig, device: torch.device) -> str:
    """Change the layers of a loaded decoder in place; return one line on what was done, or nothing.

    Layers that will be compiled stay as they are until the start-up probe has compared them.
    """
    line = fuse(decoder, "none" if compiles(model) else model.kernels, device)
    if model.recompute == "selective":
        recompute_products(decoder, products_of(decoder, device))
    return line


def rehearse_layers(decoder: Any, model: ModelConfig) -> None:
    """Change the layers of a decoder on the meta device so that it keeps what the real one keeps;
    without an accelerator it keeps what the model's own layers keep.

    Compiled layers are like fused kernels: they keep the inputs of norms and the factors of gates,
    and nothing between. Layers that are computed again in backward do not keep those either.
    """
    check_gates_known(decoder.config, model.recompute)
    if not compiles(model):
        change_layers(decoder, model, torch.device("meta"))
        return
    if model.recompute != "full":
        recompute_products(decoder, {id(layer): MetaGate.apply for layer in gates_of(decoder)})
    fuse_norms(decoder)
    if model.fp8 is not None:
        rehearse_fp8(layers_of(decoder))


def compile_layers(decoder: Any, recipe: str | None) -> str:
    """Have the layers of a transformers decoder compiled when they first meet a packed row, with
    products in FP8 by torchao's `recipe` unless it is None. Return one line on what was done.
    """
    layers = layers_of(decoder)
    line = "layers     compiled by torch.compile"
    if recipe is not None:
        num_products = to_fp8(layers, recipe)
        line += f", {num_products} products in FP8 ({recipe}) by torchao {version('torchao')}"
    # torch.compile would fuse a norm and what follows it, such as a transposed cast, into one slow
    # kernel.
    if fused_on(next(decoder.parameters()).device.type):
        fuse_norms(decoder)
    for layer in layers:
        replace_forward(layer, _compiled(layer.forward))
    return line


def _compiled(own: Forward) -> Forward:
    """Return a layer's `own` forward, compiled for packed rows."""

    def forward(hidden: Tensor, *rest: Any, **options: Any) -> Any:
        # Some families pass the mask by position, others by name.
        if not any(isinstance(item, TreeMask) for item in (*rest, *options.values())):
            return own(hidden, *rest, **options)
        # A compiler then knows that the length is a multiple of BLOCK.
        blocks, length = hidden.unflatten(1, (-1, BLOCK)), hidden.shape[1]
        mark_any_size(blocks, 1)
        for item in tree_leaves((rest, options)):
            if isinstance(item, TreeMask):
                mark_any_size(item.bounds, 1)
                for lengths in item.row.lengths() if item.row is not None else ():
                    mark_any_size(lengths, 0)
            elif isinstance(item, Tensor):
                mark_any_size(item, *(dim for dim, size in enumerate(item.shape) if size == length))
        return _compiler()(own, blocks, rest, options)

    return forward


def _run(own: Forward, blocks: Tensor, rest: Any, options: Any) -> Any:
    return own(blocks.flatten(1, 2), *rest, **options)


@lru_cache
def _compiler() -> Forward:
    let_recompile()
    return torch.compile(_run, backend=_inductor)


def _inductor(graph: Any, inputs: Any) -> Any:
    """Compile with torch's compiler, free to compute again in backward what a product there reads:
    of a gated layer it then keeps only both factors, for one more write. Results are rounded where
    the layer's own code rounds them, so that they do not depend on what is fused, which differs
    with and without gradient."""
    from torch._inductor.compile_fx import compile_fx

    with functorch.patch(ban_recompute_materialized_backward=False):
        return compile_fx(graph, inputs, config_patches={"emulate_precision_casts": True})
