"""ZeRO-3: zeros for missing gradients, gatherings after updates."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from itertools import groupby
from typing import Any

import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.zero import parameter_offload, stage3
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
    MissingGradients(optimizer)
    check_once(optimizer, plan.patches)
    return fence_of(optimizer.parameter_offload)


def forget_modules() -> None:
    """Let DeepSpeed keep modules, and with them their weights, no longer than the run."""
    replace("fresh-modules", parameter_offload, FWD_MODULE_STACK=[])
    name = check_target("fresh-modules", Coordinator, "__params_to_release")
    replace("fresh-modules", Coordinator, __params_to_release=cache(plain(vars(Coordinator)[name])))


class Buffers:
    """Flat buffers of several dtypes in place of DeepSpeed's one, of which it takes parts."""

    def __init__(self, buffers: list[Tensor]) -> None:
        self._buffers = buffers

    def narrow(self, dim: int, start: int, length: int) -> Tensor:
        """Return a part, counted in elements over all buffers."""
        for buffer in self._buffers:
            if start < buffer.numel():
                return buffer.narrow(dim, start, length)
            start -= buffer.numel()
        raise AssertionError("DeepSpeed takes more than there is")


@contextmanager
def by_dtype(plan: ZeroPlan) -> Iterator[None]:
    """Let DeepSpeed's initialization lay weights of several dtypes side by side, each for itself.
    Groups of the optimizer have one dtype, and come in the order of dtypes."""
    if plan.stage != 3:
        yield
        return
    lay = stage3.defragment

    def defragment(tensors: list[Tensor]) -> Tensor | Buffers:
        parts = [list(part) for _, part in groupby(tensors, lambda item: item.dtype)]
        return lay(tensors) if len(parts) == 1 else Buffers([lay(part) for part in parts])

    with replace("several-dtypes", stage3, defragment=defragment):
        yield


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
