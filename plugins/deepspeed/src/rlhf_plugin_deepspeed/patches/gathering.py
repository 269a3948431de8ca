"""ZeRO-3: fewer calls of the host to gather a layer and what stays whole."""

from collections.abc import Iterable
from typing import Any
from weakref import WeakKeyDictionary

from deepspeed.runtime.zero import parameter_offload, partitioned_param_coordinator
from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus
from deepspeed.runtime.zero.partitioned_param_coordinator import InflightParamRegistry
from torch import nn

from rlhf_plugin_deepspeed.patches.install import replace


class WholeLayers(InflightParamRegistry):
    """Parameters under way. All that are gathered together leave with the first one that is waited
    for, so DeepSpeed records one event for a layer instead of one for each of its parameters."""

    def pop(self, parameter: nn.Parameter, *default: Any) -> Any:
        """Return the handle to wait for."""
        handle = super().pop(parameter, *default)
        for part in getattr(handle, "handles", (handle,)):
            for other in getattr(part, "params", ()):
                self.data.pop(other, None)
        return handle


def prepare_gathering(model: nn.Module) -> None:
    """Prepare `model` for DeepSpeed's initialization, and its hooks until the run ends."""
    model.ds_inflight_param_registry = WholeLayers()
    known: WeakKeyDictionary[nn.Module, dict[bool, tuple[nn.Parameter, ...]]] = WeakKeyDictionary()

    def iter_params(module: Any, recurse: bool = False) -> Iterable[nn.Parameter]:
        found = known.setdefault(module, {})
        if recurse not in found:
            found[recurse] = tuple(module.parameters(recurse))
        # Those that it takes from other modules may be registered later.
        return (*found[recurse], *(item for _, item in module.ds_external_parameters()))

    for module in (partitioned_param_coordinator, parameter_offload):
        replace("gathering", module, iter_params=iter_params)


def gather_at_once(optimizer: Any) -> None:
    """Let DeepSpeed's optimizer gather what stays whole in one collective after a step."""
    whole = optimizer.persistent_parameters
    if not whole:
        return
    first = whole[0]
    gather_one_by_one = first.all_gather

    def all_gather(param_list: Any = None, async_op: bool = False, hierarchy: int = 0) -> Any:
        # With hpZ, the copies that a gathering within a group reads are those before the update.
        if param_list is not whole or first.ds_secondary_tensor is not None:
            return gather_one_by_one(param_list, async_op=async_op, hierarchy=hierarchy)
        absent = [item for item in whole if item.ds_status is ZeroParamStatus.NOT_AVAILABLE]
        return first.all_gather_coalesced(absent).wait() if absent else None

    replace("gathering", first, all_gather=all_gather)
