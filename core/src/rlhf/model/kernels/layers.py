"""A decoder's layers, changed as `model.kernels`, `model.fp8` and `model.recompute` say.

`forwards` says in which order.
"""

from typing import Any

import torch

from rlhf.config.sections import ModelConfig
from rlhf.engine import fused_on
from rlhf.model.kernels.compiled import check_compilable, compiles, rehearse_compiled
from rlhf.model.kernels.fused import check_fusible, check_gates_known, fuse, products_of
from rlhf.model.kernels.gates import recompute_products


def check_layers(architecture: Any, model: ModelConfig, device: torch.device) -> None:
    """Raise RLHFError if a model of transformers' `architecture` on `device` cannot run what
    `model` asks for."""
    check_fusible(architecture, model.kernels, device)
    check_gates_known(architecture, model.recompute)
    check_compilable(model, device)


def change_layers(decoder: Any, model: ModelConfig, device: torch.device) -> str:
    """Change the layers of a loaded decoder in place; return one line on what was done, or nothing.

    Layers that will be compiled stay as they are until the start-up probe has compared them.
    """
    line = fuse(decoder, "none" if compiles(model) else model.kernels, device)
    if model.recompute == "selective":
        recompute_products(decoder, products_of(decoder))
    return line


def rehearse_layers(decoder: Any, model: ModelConfig) -> None:
    """Change the layers of a decoder on the meta device so that it keeps what the real one keeps;
    without an accelerator it keeps what the model's own layers keep."""
    if compiles(model):
        rehearse_compiled(decoder, model.fp8, again=model.recompute == "full")
    else:
        kernels = model.kernels if fused_on("meta") else "none"
        fuse(decoder, kernels, torch.device("meta"))
    if model.recompute == "selective":
        recompute_products(decoder, products_of(decoder))
