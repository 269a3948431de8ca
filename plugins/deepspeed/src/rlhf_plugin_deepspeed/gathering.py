"""Parameters of ZeRO-3 gathered with less for the host to do.

Each step gathers every layer twice, and DeepSpeed looks after every parameter of it by itself: a
copy for each rank, an event to wait for, questions about its group, place and dtype. On several
accelerators that made the host the slower side (benchmarks/NOTES.md). Here a gathering is one piece
of work. DeepSpeed's names are those of 0.19.0 to 0.19.8.
"""

from collections.abc import Iterable
from typing import Any

import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus
from deepspeed.runtime.zero.partitioned_param_coordinator import InflightParamRegistry
from torch import Tensor, distributed, nn

PRIVATE = (
    "all_gather_params",
    "release_param",
    "allgather_stream",
    "inflight_param_registry",
    "n_available_params",
    "max_ongoing_fetch_events",
)
"""Names of DeepSpeed's coordinator that the backend reads or sets."""


class Gathering:
    """Parameters on their way from all ranks in one buffer, [ranks, elements of their shards];
    `work` is the collective."""

    def __init__(self, params: list[Any], buffer: Tensor, work: Any) -> None:
        self.params = params
        self._buffer = buffer
        self._work = work

    @torch.no_grad()
    def wait(self, handle_dependency: bool = True) -> None:
        """Have the current stream wait for them and copy each to a place of its own.
        `handle_dependency` is DeepSpeed's word for its fast sharding of leaves, which is off."""
        if self._work is None:
            return
        self._work.wait()
        self._work = None
        for parameter, whole in zip(self.params, self._apart(), strict=True):
            if parameter.ds_numel < whole.numel():
                # Shards of one size are padded at the end.
                whole = whole.view(-1)[: parameter.ds_numel]
            parameter.data = whole.view(parameter.ds_shape)
            parameter.ds_status = ZeroParamStatus.AVAILABLE
        del self._buffer

    def _apart(self) -> list[Tensor]:
        buffer = self._buffer
        if len(self.params) == 1:
            return [buffer]
        sizes = [parameter.ds_tensor.ds_numel for parameter in self.params]
        wholes = [buffer.new_empty((len(buffer), size)) for size in sizes]
        torch.split_with_sizes_copy(buffer, sizes, dim=1, out=wholes)
        if not get_accelerator().is_synchronized_device():
            # It may have been made on another stream than the one that reads it here.
            buffer.record_stream(get_accelerator().current_stream())
        return wholes


@torch.no_grad()
def gather(params: Iterable[Any], group: distributed.ProcessGroup) -> list[Gathering]:
    """Start to gather parameters that are sharded over `group`, by one collective for each dtype.
    Collective: every rank gives the same ones."""
    kinds: dict[torch.dtype, list[Any]] = {}
    for parameter in sorted(params, key=lambda item: item.ds_id):
        kinds.setdefault(parameter.ds_tensor.dtype, []).append(parameter)
        parameter.ds_status = ZeroParamStatus.INFLIGHT
    return [_gather_alike(members, group) for members in kinds.values()]


def _gather_alike(params: list[Any], group: distributed.ProcessGroup) -> Gathering:
    device = get_accelerator().current_device_name()
    # Shards may be kept on the host.
    shards = [parameter.ds_tensor.to(device) for parameter in params]
    elements = sum(parameter.ds_tensor.ds_numel for parameter in params)
    buffer = shards[0].new_empty((group.size(), elements))
    own = buffer[group.rank()]
    torch.cat(shards, out=own)
    work = distributed.all_gather_into_tensor(buffer.view(-1), own, group=group, async_op=True)
    return Gathering(params, buffer, work)


def take_over(offload: Any) -> None:
    """Have modules' parameters gathered and released here. `offload` is DeepSpeed's for one engine.

    DeepSpeed asks each parameter for its group, its place, its dtype and its neighbours every time.
    """
    coordinator, name = coordinator_of(offload)
    group = _group_of(list(offload.module.parameters()))
    if group is None or name is None:
        return
    accelerator = get_accelerator()
    stream = getattr(coordinator, f"{name}allgather_stream")
    inflight = getattr(coordinator, f"{name}inflight_param_registry")

    def count(elements: int) -> None:
        counted = f"{name}n_available_params"
        setattr(coordinator, counted, getattr(coordinator, counted) + elements)

    def all_gather_params(params: Iterable[Any], forward: bool) -> None:
        absent = [item for item in params if item.ds_status is ZeroParamStatus.NOT_AVAILABLE]
        with accelerator.stream(stream):
            gatherings = gather(absent, group)
        for gathering in gatherings:
            for parameter in gathering.params:
                inflight[parameter] = gathering
                count(parameter.ds_numel)

    def release_param(parameter: Any, free_data: bool = True) -> None:
        if parameter.ds_status is not ZeroParamStatus.AVAILABLE or parameter.ds_active_sub_modules:
            return
        if not accelerator.is_synchronized_device():
            parameter.data.record_stream(accelerator.current_stream())
        parameter.data = parameter.data.new_empty(0)
        parameter.ds_status = ZeroParamStatus.NOT_AVAILABLE
        count(-parameter.ds_numel)

    setattr(coordinator, f"{name}all_gather_params", all_gather_params)
    setattr(coordinator, f"{name}release_param", release_param)


def coordinator_of(offload: Any) -> tuple[Any, str | None]:
    """What fetches and releases, and what its private names begin with; None where a later
    DeepSpeed has others."""
    coordinator = offload.get_param_coordinator()
    name = f"_{type(coordinator).__name__}__"
    known = all(hasattr(coordinator, name + item) for item in PRIVATE)
    return coordinator, name if known else None


def _group_of(parameters: list[Any]) -> distributed.ProcessGroup | None:
    """The ranks over which all of these are sharded; None where that is one, or where not each has
    one shard on every rank, in its own dtype and in memory."""
    groups = {item.ds_process_group for item in parameters}
    plain = all(
        item.ds_secondary_tensor is None
        and item.nvme_swapper is None
        and not hasattr(item.ds_tensor, "ds_quant_scale")
        and item.ds_tensor.dtype == item.dtype
        for item in parameters
    )
    group = groups.pop()
    return group if plain and not groups and group.size() > 1 else None


class Inflight(InflightParamRegistry):
    """Which parameters are on their way. All that come together leave with the first that is waited
    for: one event for a layer instead of one for each of its parameters.

    One that a pass fetched ahead and did not use is released by the optimizer's step, or used by
    the next pass.
    """

    def pop(self, parameter: nn.Parameter, *default: Any) -> Any:
        """What to wait for."""
        handle = super().pop(parameter, *default)
        for other in _parameters(handle):
            self.data.pop(other, None)
        return handle


def _parameters(handle: Any) -> Iterable[nn.Parameter]:
    for part in getattr(handle, "handles", (handle,)):
        yield from getattr(part, "params", ())


def gather_at_once(optimizer: Any) -> None:
    """Have the parameters that stay whole gathered in one collective after a step. DeepSpeed takes
    one for each and then waits for the device."""
    if not optimizer.persistent_parameters:
        return
    first: Any = optimizer.persistent_parameters[0]
    own = first.all_gather
    group = _group_of(optimizer.persistent_parameters)

    def all_gather(param_list: Any = None, async_op: bool = False, hierarchy: int = 0) -> Any:
        if param_list is not optimizer.persistent_parameters or async_op:
            return own(param_list, async_op=async_op, hierarchy=hierarchy)
        absent = [item for item in param_list if item.ds_status is ZeroParamStatus.NOT_AVAILABLE]
        if absent:
            gatherings = gather(absent, group) if group else [first.all_gather_coalesced(absent)]
            for gathering in gatherings:
                gathering.wait()
        return None

    first.all_gather = all_gather
