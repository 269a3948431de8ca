"""How fast a step was: useful tokens per second, and their operations over what the device can
do."""

from collections.abc import Mapping

import torch
from attrs import frozen

from rlhf.data.order import StepPlan
from rlhf.engine import ModelShape

PEAK_FLOPS: Mapping[str, float] = {
    "GB200": 2500e12, "B200": 2250e12, "GH200": 989e12, "H200": 989e12, "H100 PCIe": 756e12,
    "H100": 989e12, "H800": 989e12, "A100": 312e12, "A800": 312e12, "L40S": 362e12,
    "RTX 4090": 165e12, "MI300X": 1307e12,
}  # fmt: skip
"""Dense bf16 operations per second by a part of the device's name, from the vendors' data
sheets."""


@frozen(kw_only=True)
class Speed:
    """Operations of a model on packed rows, forward and backward, recomputation not counted."""

    shape: ModelShape
    peak: float | None
    """Operations per second that all ranks' devices together can do in bf16, or None if unknown."""

    def flops(self, plan: StepPlan) -> float:
        """Operations of a step over all ranks. Two per weight and token forward, four backward (two
        for a frozen weight), the head on predicted tokens alone; causal attention counts half."""
        shape = self.shape
        frozen_share = 1 - shape.trainable / max(shape.parameters, 1)
        per_weight = 6 - 2 * frozen_share
        body = max(shape.parameters - shape.head - shape.lookup, 0)
        tokens, predicted = float(plan.lengths.sum()), plan.totals["tokens"]
        pairs = float((plan.lengths * plan.paths).sum()) / 2
        return (
            per_weight * (body * tokens + shape.head * predicted)
            + 12 * shape.layers * shape.hidden * pairs
        )


def peak_of(device: torch.device, world: int) -> float | None:
    """The operations per second of `world` devices like this one, or None for one that is not
    known."""
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    return next((flops * world for part, flops in PEAK_FLOPS.items() if part in name), None)


def peak_memory_gib(device: torch.device) -> float | None:
    """Highest memory the tensors of this process took on its accelerator, in GiB; None on the
    CPU."""
    if device.type == "cpu":
        return None
    return float(torch.accelerator.max_memory_allocated(device) / 2**30)
