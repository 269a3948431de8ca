"""What DeepSpeed's hooks look up at ZeRO-3 in every pass, looked up once; and nothing said that is
not printed. DeepSpeed's names are those of 0.19.0 to 0.19.8."""

import inspect
import itertools
from collections.abc import Iterable
from typing import Any
from weakref import WeakKeyDictionary

from deepspeed.runtime.zero import (
    parameter_offload,
    partition_parameters,
    partitioned_param_coordinator,
)
from deepspeed.utils import nvtx
from torch import nn

deepspeed_print = partition_parameters.print_rank_0
deepspeed_parameters = partitioned_param_coordinator.iter_params

_known: WeakKeyDictionary[nn.Module, dict[bool, tuple[Any, ...]]] = WeakKeyDictionary()


def remember_parameters(model: nn.Module) -> None:
    """Have DeepSpeed not search each module of `model` for its parameters, nor read the signatures
    of its hooks, in every pass."""
    for module in model.modules():
        _known[module] = {}
        for name in ("pre_bwd_fn", "post_bwd_fn"):
            forward = getattr(vars(module).get(name), "forward", None)
            if forward is not None:
                forward.__signature__ = inspect.signature(forward)


def parameters_of(module: Any, recurse: bool = False) -> Iterable[Any]:
    """The parameters of a module and those that it takes from elsewhere."""
    known = _known.get(module)
    if known is None:
        return deepspeed_parameters(module, recurse)
    if recurse not in known:
        known[recurse] = tuple(module.parameters(recurse))
    external = (parameter for _, parameter in module.ds_external_parameters())
    return itertools.chain(known[recurse], external)


def print_forced(message: str, debug: bool = False, force: bool = False) -> None:
    """DeepSpeed's own asks for the rank before it prints nothing, in every pass."""
    if debug or force:
        deepspeed_print(message, debug=debug, force=force)


partition_parameters.print_rank_0 = print_forced
partitioned_param_coordinator.print_rank_0 = print_forced
partitioned_param_coordinator.iter_params = parameters_of
parameter_offload.iter_params = parameters_of
# Around every call of DeepSpeed's, for NVIDIA's profiler alone.
nvtx.enable_nvtx = False
