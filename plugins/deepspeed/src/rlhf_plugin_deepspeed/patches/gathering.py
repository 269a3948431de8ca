"""Parameters of ZeRO-3 gathered with fewer waits and fewer collectives, and after their update."""

from collections.abc import Callable
from typing import Any

from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus
from deepspeed.runtime.zero.partitioned_param_coordinator import InflightParamRegistry
from torch import nn

from rlhf_plugin_deepspeed.patches.install import check_target, replace


class WholeLayers(InflightParamRegistry):
    """Parameters under way. All that are gathered together leave with the first one that is waited
    for: one event for a layer instead of one for each of its parameters.

    What a pass fetched ahead and did not use is released by the optimizer's step, or used by the
    next pass.
    """

    def pop(self, parameter: nn.Parameter, *default: Any) -> Any:
        """Return the handle to wait for."""
        handle = super().pop(parameter, *default)
        for part in getattr(handle, "handles", (handle,)):
            for other in getattr(part, "params", ()):
                self.data.pop(other, None)
        return handle


def gather_at_once(optimizer: Any) -> None:
    """Gather the parameters that stay whole in one collective after a step."""
    if not optimizer.persistent_parameters:
        return
    first: Any = optimizer.persistent_parameters[0]
    gather_one_by_one = first.all_gather

    def all_gather(param_list: Any = None, async_op: bool = False, hierarchy: int = 0) -> Any:
        if param_list is not optimizer.persistent_parameters or async_op:
            return gather_one_by_one(param_list, async_op=async_op, hierarchy=hierarchy)
        absent = [item for item in param_list if item.ds_status is ZeroParamStatus.NOT_AVAILABLE]
        if absent:
            first.all_gather_coalesced(absent).wait()
        return None

    replace("gathering", first, all_gather=all_gather)


def fence_of(offload: Any) -> Callable[[], None]:
    """Return a function that keeps gatherings, which run on a stream of their own, behind an update
    that was launched. `offload` is DeepSpeed's for one engine."""
    stream = getattr(offload, check_target("gather-after-update", offload, "__allgather_stream"))
    accelerator = get_accelerator()
    if accelerator.is_synchronized_device():
        return lambda: None
    return lambda: stream.wait_stream(accelerator.current_stream())
