"""ZeRO-3: no wait of the host for gradients, zeros for missing ones, gatherings after updates."""

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.zero import parameter_offload
from deepspeed.runtime.zero.parameter_offload import PartitionedParameterCoordinator as Coordinator
from torch import Tensor

from rlhf_plugin_deepspeed.patches.checks import check_once
from rlhf_plugin_deepspeed.patches.gathering import gather_at_once
from rlhf_plugin_deepspeed.patches.install import check_target, plain, replace
from rlhf_plugin_deepspeed.plans import ZeroPlan


def patch_stage_3(optimizer: Any, plan: ZeroPlan) -> Callable[[], None]:
    """Patch DeepSpeed's optimizer; returns what keeps gatherings behind an update."""
    if plan.stage != 3:
        return lambda: None
    if "gathering" in plan.patches:
        gather_at_once(optimizer)
    if "no-wait" in plan.patches:
        reduce_beside_host(optimizer)
    MissingGradients(optimizer)
    check_once(optimizer, plan.patches)
    return fence_of(optimizer.parameter_offload)


def forget_modules() -> None:
    """Let DeepSpeed keep modules, and with them their weights, no longer than the run."""
    replace("fresh-modules", parameter_offload, FWD_MODULE_STACK=[])
    name = check_target("fresh-modules", Coordinator, "__params_to_release")
    replace("fresh-modules", Coordinator, __params_to_release=cache(plain(vars(Coordinator)[name])))


def reduce_beside_host(optimizer: Any) -> None:
    """Let the host prepare the step while the last gradients of `optimizer`, DeepSpeed's at stage
    3, are reduced. DeepSpeed waits after each backward pass."""
    accelerator, stream = get_accelerator(), optimizer.reduce_and_partition_stream
    if not accelerator.is_synchronized_device() and stream != accelerator.default_stream():
        replace("no-wait", optimizer, reduce_and_partition_stream=ordered(type(stream)))


def ordered(kind: type) -> Any:
    """Return a stream of this class whose results are read on other streams: to wait for it is to
    let the current stream wait, while the host continues."""

    def synchronize(stream: Any) -> None:
        get_accelerator().current_stream().wait_stream(stream)

    return type("Ordered", (kind,), {"synchronize": synchronize})()


class MissingGradients:
    """Counts as zeros what a backward pass gives no gradient on any rank.

    DeepSpeed keeps the shard of an earlier pass then: where a step's first micro-batch has no
    gradient, that of the step before; with the optimizer on the CPU, also where its last has none.
    """

    def __init__(self, optimizer: Any) -> None:
        self._optimizer = optimizer
        self._reduced: dict[Any, bool] = {}
        """Whether a parameter that ever had a gradient has one in this pass; in the same order on
        all ranks."""
        self._keep = optimizer.partition_grads
        self._end = optimizer.independent_gradient_partition_epilogue
        replace(
            "missing-gradients",
            optimizer,
            partition_grads=self._partition_grads,
            independent_gradient_partition_epilogue=self._finish,
        )

    def _partition_grads(self, params_to_release: list[Any], grad_partitions: list[Tensor]) -> Any:
        self._reduced.update(dict.fromkeys(params_to_release, True))
        return self._keep(params_to_release, grad_partitions)

    def _finish(self) -> None:
        self._end()
        missing = [parameter for parameter, reduced in self._reduced.items() if not reduced]
        self._reduced = dict.fromkeys(self._reduced, False)
        optimizer = self._optimizer
        # Without offload, the sum of the step's earlier micro-batches is right as it is.
        if missing and (optimizer.micro_step_id == 0 or optimizer.offload_optimizer):
            self._write_zeros(missing)

    def _write_zeros(self, missing: list[Any]) -> None:
        accelerator, stream = get_accelerator(), self._optimizer.reduce_and_partition_stream
        in_line = accelerator.resolves_data_dependency()
        device = accelerator.current_device_name()
        if not in_line:
            # The update of the last step may still read what is written here.
            stream.wait_stream(accelerator.current_stream())
        with accelerator.stream(stream):
            for item in missing:
                zeros = torch.zeros(item.partition_numel(), dtype=item.dtype, device=device)
                self._keep([item], [zeros])
        if not in_line:
            stream.synchronize()


def fence_of(offload: Any) -> Callable[[], None]:
    """Return a function that keeps gatherings, which run on a stream of their own, behind an update
    that was launched. `offload` is DeepSpeed's for one engine."""
    stream = getattr(offload, check_target("gather-after-update", offload, "__allgather_stream"))
    accelerator = get_accelerator()
    if accelerator.is_synchronized_device():
        return lambda: None
    return lambda: stream.wait_stream(accelerator.current_stream())
