"""A part of the optimizer on the CPU at stage 3 (`deepspeed.offload_ratio`; Twin-Flow of
ZeRO-Offload++): the rest stays on the accelerator and is updated there.

DeepSpeed's own `ratio` counts sub-groups, whatever their sizes, and gives those on the accelerator
to a second AdamW, whose first group keeps the learning rate of the start. Here one optimizer
updates both parts: DeepSpeed steps one sub-group at a time.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from rlhf_plugin_deepspeed.plans import ZeroPlan


def host_share(zero: Mapping[str, Any]) -> float:
    """Return the share of the optimizer that DeepSpeed's settings `zero` put on the CPU."""
    offload = zero.get("offload_optimizer")
    return 0.0 if offload is None else float(offload.get("ratio", 1.0))


def keep_on_accelerator(optimizer: Any, plan: ZeroPlan, device: torch.device) -> None:
    """Move the masters of sub-groups of `optimizer`, DeepSpeed's at stage 3, from the CPU to the
    accelerator, where their gradients are then copied to."""
    masters = optimizer.fp32_partitioned_groups_flat
    share = host_share(plan.settings["zero_optimization"])
    for place in staying([master.numel() for master in masters], share):
        master = masters[place]
        master.data = master.data.to(device)
        # A new tensor: the one before is in pinned memory of the host.
        master.grad = torch.zeros_like(master)


def staying(sizes: Sequence[int], share: float) -> list[int]:
    """Return the places of the sub-groups of these sizes that stay on the accelerator: as many, in
    their order, as leave at least `share` of all elements to the CPU."""
    places, room = [], (1 - share) * sum(sizes)
    for place, size in enumerate(sizes):
        if size <= room:
            room -= size
            places.append(place)
    return places
