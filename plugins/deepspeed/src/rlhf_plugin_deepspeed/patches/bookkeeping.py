"""What DeepSpeed's hooks look up at ZeRO-3 in every pass, looked up once."""

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

from rlhf_plugin_deepspeed.patches.install import replace

deepspeed_print = partition_parameters.print_rank_0
deepspeed_parameters = partitioned_param_coordinator.iter_params

_known: WeakKeyDictionary[nn.Module, dict[bool, tuple[Any, ...]]] = WeakKeyDictionary()


def look_up_once(model: nn.Module) -> None:
    """Spare the host what DeepSpeed repeats in every pass of `model`."""
    remember_parameters(model)
    for module in (partitioned_param_coordinator, parameter_offload):
        replace("bookkeeping", module, iter_params=parameters_of)
    for module in (partition_parameters, partitioned_param_coordinator):
        replace("bookkeeping", module, print_rank_0=print_if_forced)
    replace("bookkeeping", nvtx, enable_nvtx=False)


def remember_parameters(model: nn.Module) -> None:
    """Remember the parameters of each module of `model` and the signatures of its hooks."""
    for module in model.modules():
        _known[module] = {}
        for name in ("pre_bwd_fn", "post_bwd_fn"):
            forward = getattr(vars(module).get(name), "forward", None)
            if forward is not None:
                forward.__signature__ = inspect.signature(forward)


def parameters_of(module: Any, recurse: bool = False) -> Iterable[Any]:
    """Return the parameters of a module and those that it takes from elsewhere."""
    known = _known.get(module)
    if known is None:
        return deepspeed_parameters(module, recurse)
    if recurse not in known:
        known[recurse] = tuple(module.parameters(recurse))
    # These may be registered later.
    external = (parameter for _, parameter in module.ds_external_parameters())
    return itertools.chain(known[recurse], external)


def print_if_forced(message: str, debug: bool = False, force: bool = False) -> None:
    """Print where DeepSpeed's own would, without the lookup of the rank where it would not."""
    if debug or force:
        deepspeed_print(message, debug=debug, force=force)
