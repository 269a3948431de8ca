"""Parameter groups of the optimizer: which weights decay."""

from typing import Any

from torch import nn

from rlhf.engine import whole_shape

NORMS = (nn.LayerNorm, nn.GroupNorm, nn.RMSNorm, nn.modules.batchnorm._BatchNorm)
"""torch's own normalisation modules."""


def parameter_groups(module: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Return the trained parameters in groups for the optimizer: `{"params": [...],
    "weight_decay": float}`.

    Only matrices outside of norms decay. Norm weights, biases and all parameters that were created
    with fewer than two dimensions do not.
    """
    decayed: list[nn.Parameter] = []
    kept: list[nn.Parameter] = []
    seen: set[int] = set()
    for owner in module.modules():
        for name, parameter in owner.named_parameters(recurse=False):
            if not parameter.requires_grad or id(parameter) in seen:
                continue
            seen.add(id(parameter))
            # At ZeRO-3 the parameter itself is flat.
            matrix = len(whole_shape(parameter)) >= 2
            decays = matrix and not is_norm(owner) and not name.endswith("bias")
            (decayed if decays else kept).append(parameter)
    groups = [(decayed, weight_decay), (kept, 0.0)]
    return [{"params": params, "weight_decay": decay} for params, decay in groups if params]


def is_norm(module: nn.Module) -> bool:
    """Return whether a module normalises; families name their own RMS norm classes `...Norm`."""
    return isinstance(module, NORMS) or type(module).__name__.endswith("Norm")
