"""ZeRO-3 with less for the host to do.

Each step gathers every layer twice, and DeepSpeed looks after every parameter of it by itself: a
copy for each rank, an event to wait for, a range for a profiler. On several accelerators that made
the host the slower side (benchmarks/NOTES.md). Here a gathering is one piece of work, the host goes
ahead as far as memory allows, and after an update the streams wait for each other where DeepSpeed
has the host wait for them. DeepSpeed's names are those of 0.19.0 to 0.19.8.
"""

import inspect
import itertools
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any
from weakref import WeakKeyDictionary

import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.zero import (
    parameter_offload,
    partition_parameters,
    partitioned_param_coordinator,
)
from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus
from deepspeed.runtime.zero.partitioned_param_coordinator import InflightParamRegistry
from deepspeed.utils import nvtx
from torch import Tensor, distributed, nn

plain_linear = torch._C._nn.linear
"""torch.nn.functional.linear, which DeepSpeed replaces for the whole process."""
deepspeed_linear = partition_parameters.zero3_linear_wrap
deepspeed_print = partition_parameters.print_rank_0
deepspeed_parameters = partitioned_param_coordinator.iter_params
PRIVATE = (
    "all_gather_params",
    "release_param",
    "allgather_stream",
    "inflight_param_registry",
    "n_available_params",
    "max_n_available_params",
    "max_ongoing_fetch_events",
)
"""Names of DeepSpeed's coordinator that are read or set here."""


class ShardedLinear(torch.autograd.Function):
    """`input` [..., in] times the transpose of `weight` [out, in], plus `bias` [out].

    torch's own keeps a view of the weight for backward, and with it the memory that ZeRO-3 wants
    back after the layer; this keeps the parameter, whatever it holds then.
    """

    @staticmethod
    def forward(ctx: Any, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        to_input, to_weight, _ = ctx.needs_input_grad
        ctx.save_for_backward(input if to_weight else None, weight if to_input else None)
        if bias is None or input.dim() == 2:
            return plain_linear(input, weight, bias)
        rows = plain_linear(input.reshape(-1, input.shape[-1]), weight, bias)
        # A view could not be changed in place.
        return torch.ops.aten._unsafe_view(rows, [*input.shape[:-1], len(weight)])

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (gradient,) = gradients
        input, weight = ctx.saved_tensors
        to_input, to_weight, to_bias = ctx.needs_input_grad
        rows = gradient.reshape(-1, gradient.shape[-1])
        return (
            _times_weight(gradient, weight) if to_input else None,
            rows.t() @ input.reshape(-1, input.shape[-1]) if to_weight else None,
            rows.sum(0) if to_bias else None,
        )


def _times_weight(gradient: Tensor, weight: Any) -> Tensor:
    # A module whose output needs no gradient by itself is not gathered for backward. What runs a
    # layer again hands over a tensor that is no parameter, just gathered.
    absent = getattr(weight, "ds_status", None) is ZeroParamStatus.NOT_AVAILABLE
    if absent:
        weight.all_gather()
    try:
        return gradient @ weight
    finally:
        if absent:
            weight.partition()


def linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """What stands for torch.nn.functional.linear once a model's weights are sharded."""
    if not (hasattr(weight, "ds_id") and torch.is_grad_enabled()):
        return plain_linear(input, weight, bias)
    if torch.is_autocast_enabled(input.device.type):
        return deepspeed_linear(input, weight, bias)
    return ShardedLinear.apply(input, weight, bias)


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
        `handle_dependency` is DeepSpeed's, for what is not used here."""
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
    coordinator, name = _coordinator(offload)
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


def _coordinator(offload: Any) -> tuple[Any, str | None]:
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


def fence_of(offload: Any) -> Callable[[], None]:
    """What keeps gatherings, which run on a stream of their own, behind an update of the weights
    that was launched. `offload` is DeepSpeed's for one engine."""
    accelerator = get_accelerator()
    if accelerator.is_synchronized_device():
        return lambda: None
    stream = getattr(offload, "_DeepSpeedZeRoOffload__allgather_stream", None)
    if stream is None:
        # A later DeepSpeed may call it something else.
        return lambda: accelerator.current_stream().synchronize()
    return lambda: stream.wait_stream(accelerator.current_stream())


class Backlog:
    """Keeps the host from gathering too far ahead of the device.

    What is released on the host is memory until the device has read it for the last time. DeepSpeed
    counts it as gone, and bounds the number of gatherings that are under way instead. Here more is
    gathered when what is gathered and what is not yet read are at most `limit` elements together,
    however far ahead the host is.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._read: deque[tuple[Any, int]] = deque()
        """Events after the last use of what was released, with its elements; the oldest first."""
        self._elements = 0

    def released(self, elements: int) -> None:
        """So many elements are given up by the host; the current stream may still read them."""
        event = get_accelerator().Event()
        event.record()
        self._read.append((event, elements))
        self._elements += elements

    def make_room(self, gathered: int) -> None:
        """Wait until there is room beside so many elements that are gathered."""
        while self._read:
            event, elements = self._read[0]
            if not event.query():
                if gathered + self._elements <= self.limit:
                    return
                event.synchronize()
            self._read.popleft()
            self._elements -= elements


def run_ahead(offload: Any, layer: int) -> None:
    """Let the host gather ahead as far as memory allows, and not two gatherings; `layer` is the
    elements of the largest layer. `offload` is DeepSpeed's for one engine."""
    coordinator, name = _coordinator(offload)
    if get_accelerator().is_synchronized_device() or not layer or name is None:
        return
    gathered = f"{name}n_available_params"
    # In backward what is fetched ahead takes the room of layers that the device still reads.
    backlog = Backlog(getattr(coordinator, f"{name}max_n_available_params") * 3 // 2)
    fetch, release = coordinator.fetch_sub_module, coordinator.release_sub_module

    def fetch_sub_module(module: nn.Module, forward: bool) -> None:
        backlog.make_room(getattr(coordinator, gathered))
        fetch(module, forward)

    def release_sub_module(module: nn.Module, forward: bool = False) -> None:
        before = getattr(coordinator, gathered)
        release(module, forward)
        gone = before - getattr(coordinator, gathered)
        if gone:
            backlog.released(gone)

    coordinator.fetch_sub_module = fetch_sub_module
    coordinator.release_sub_module = release_sub_module
    # One under way takes its elements twice, until they are copied to their places.
    under_way = max(2, backlog.limit // (6 * layer))
    setattr(coordinator, f"{name}max_ongoing_fetch_events", under_way)


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


partition_parameters.zero3_linear_wrap = linear
partition_parameters.print_rank_0 = print_forced
partitioned_param_coordinator.print_rank_0 = print_forced
partitioned_param_coordinator.iter_params = parameters_of
parameter_offload.iter_params = parameters_of
# Around every call of DeepSpeed's, for NVIDIA's profiler alone.
nvtx.enable_nvtx = False
