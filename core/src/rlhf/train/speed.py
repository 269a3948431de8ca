"""The speed of steps: useful tokens per second, and model FLOPS utilization (MFU)."""

from collections.abc import Mapping, Sequence

import torch
from attrs import define, field

from rlhf.data.batch import PackedBatch
from rlhf.data.order import StepPlan
from rlhf.engine import ModelShape
from rlhf.launch.clock import Clock

PEAK_FLOPS: Mapping[str, float] = {
    "GB200": 2500e12, "B200": 2250e12, "GH200": 989e12, "H200": 989e12, "H100 PCIe": 756e12,
    "H100": 989e12, "H800": 989e12, "A100": 312e12, "A800": 312e12, "L40S": 362e12,
    "RTX 4090": 165e12, "MI300X": 1307e12,
}  # fmt: skip
"""Dense bf16 operations per second by a part of the device's name, from the vendors' data sheets.
"""


@define(kw_only=True)
class Speed:
    """The speed of the steps since the last logged one."""

    shapes: Sequence[ModelShape]
    """Of the trained models."""
    peak: float | None
    """Operations per second that all ranks' devices together can do in bf16, or None if unknown."""
    clock: Clock = field(factory=lambda: Clock("steps"))
    """Its part `steps` has the time of the steps, without that of evaluations."""
    _tokens: float = field(default=0.0, init=False)
    _flops: float = field(default=0.0, init=False)
    _used: int = field(default=0, init=False)
    _computed: int = field(default=0, init=False)

    def add(self, plan: StepPlan, batches: Sequence[PackedBatch]) -> None:
        """Add a step and this rank's micro-batches."""
        self._tokens += float(plan.lengths.sum())
        self._flops += sum(flops(shape, plan) for shape in self.shapes)
        self._used += sum(batch.num_tokens for batch in batches)
        self._computed += sum(len(batch.tokens) for batch in batches)

    def restarted(self) -> "Speed":
        """Return the speed of the steps from now on."""
        return Speed(shapes=self.shapes, peak=self.peak)

    def metrics(self) -> dict[str, float]:
        """Return `tokens_per_s`, and `mfu` if the device's peak is known."""
        self.clock.enter("steps")
        seconds = self.clock.seconds["steps"]
        metrics = {"tokens_per_s": self._tokens / seconds}
        if self.peak is not None:
            metrics["mfu"] = self._flops / seconds / self.peak
        return metrics

    @property
    def padding(self) -> float:
        """The share of padding in the tokens that this rank computed."""
        return 1 - self._used / self._computed


def flops(shape: ModelShape, plan: StepPlan) -> float:
    """Return the operations of a step over all ranks, forward and backward, without recomputation:
    two per weight and token forward, four backward (two for a frozen weight), the head only on
    predicted tokens, experts only on theirs, and half of full attention, since it is causal."""
    frozen_share = 1 - shape.trainable / max(shape.parameters, 1)
    per_weight = 6 - 2 * frozen_share
    body = max(shape.parameters - shape.head - shape.lookup - shape.idle, 0)
    tokens, predicted = float(plan.lengths.sum()), plan.totals["tokens"]
    pairs = float((plan.lengths * plan.paths).sum()) / 2
    return (
        per_weight * (body * tokens + shape.head * predicted)
        + 12 * shape.layers * shape.hidden * pairs
    )


def peak_of(device: torch.device, world: int) -> float | None:
    """Return the operations per second of `world` devices like this one, or None if unknown."""
    if device.type == "cpu":
        return None
    name = torch.get_device_module(device).get_device_name(device)
    return next((flops * world for part, flops in PEAK_FLOPS.items() if part in name), None)
