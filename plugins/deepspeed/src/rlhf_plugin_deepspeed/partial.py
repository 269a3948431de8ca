"""A part of the optimizer on the CPU at stage 3 (`deepspeed.offload_ratio`; Twin-Flow of
ZeRO-Offload++): the rest stays on the accelerator and is updated there.

DeepSpeed's own `ratio` counts sub-groups, whatever their sizes, and gives those on the accelerator
to a second AdamW, whose first group keeps the learning rate of the start. Here one optimizer
updates both parts, with one list of groups and one state.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from deepspeed.ops.adam import DeepSpeedCPUAdam
from torch import Tensor
from torch.optim import AdamW

from rlhf.engine import Plan


class PartialCPUAdam(DeepSpeedCPUAdam):
    """DeepSpeedCPUAdam for masters on the CPU, torch's AdamW for those `on_accelerator`.

    DeepSpeed steps one sub-group at a time, so that the parameters of a step are of one kind.
    """

    def __init__(self, groups: Sequence[Mapping[str, Any]], **settings: Any) -> None:
        super().__init__([dict(group) for group in groups], adamw_mode=True, **settings)
        self.on_accelerator: set[Tensor] = set()
        self._fused = AdamW([torch.zeros(1)], fused=True)
        for group in self.param_groups:
            # torch reads settings from each group that DeepSpeed's does not have.
            group.update(self._fused.defaults | group)

    def step(self, closure: Callable[[], float] | None = None) -> None:
        """Update every parameter that has a gradient."""
        assert closure is None
        chosen = {item for group in self.param_groups for item in group["params"]}
        if chosen.isdisjoint(self.on_accelerator):
            super().step()
            return
        assert chosen <= self.on_accelerator
        self._fused.param_groups, self._fused.state = self.param_groups, self.state
        self._fused.step()


def host_share(zero: Mapping[str, Any]) -> float:
    """Return the share of the optimizer that DeepSpeed's settings `zero` put on the CPU."""
    offload = zero.get("offload_optimizer")
    return 0.0 if offload is None else float(offload.get("ratio", 1.0))


def keep_on_accelerator(optimizer: Any, plan: Plan, device: torch.device) -> None:
    """Move sub-groups of `optimizer`, DeepSpeed's at stage 3, from the CPU to the accelerator, as
    many as the plan's share leaves room for: their masters and the gradients of those."""
    masters = optimizer.fp32_partitioned_groups_flat
    room = (1 - host_share(plan.settings["zero_optimization"])) * sum(map(torch.numel, masters))
    for master in masters:
        if master.numel() > room:
            continue
        room -= master.numel()
        master.data, master.grad.data = master.data.to(device), master.grad.data.to(device)
        if isinstance(optimizer.optimizer, PartialCPUAdam):
            optimizer.optimizer.on_accelerator.add(master)
