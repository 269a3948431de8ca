"""Engines around DeepSpeed's: gradients that add over ranks, and no step that does harm."""

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from attrs import Factory, define
from deepspeed.runtime.base_optimizer import ZeROOptimizer
from torch import Tensor
from torch.optim.lr_scheduler import LRScheduler

from rlhf.engine import LaterOutcome, Mesh, StateKind, StepOutcome
from rlhf_plugin_deepspeed.patches.stages_1_and_2 import GradientOrder
from rlhf_plugin_deepspeed.plans import ZeroPlan


@define(kw_only=True, eq=False, slots=False)
class InferenceEngine:
    """A model that is run and never trained: a reference, a teacher."""

    module: Any
    """What was prepared, unwrapped."""
    runner: Any
    """What is called: DeepSpeed's engine, or below stage 3 a frozen module itself."""
    role: str
    plan: ZeroPlan
    mesh: Mesh
    stage: int = Factory(lambda it: it.plan.stage, takes_self=True)
    sharded: bool = Factory(lambda it: it.plan.sharded, takes_self=True)
    precision: str = Factory(lambda it: it.plan.precision, takes_self=True)
    device: torch.device = Factory(lambda it: it.mesh.device, takes_self=True)
    on_host: dict[StateKind, list[Any]] = Factory(dict)
    """States that are on the host for now, as `offload.HostCopy` by kind."""

    def __call__(self, *inputs: Any, **options: Any) -> Any:
        """Run the module's forward; collective at stage 3."""
        return self.runner(*inputs, **options)

    def backward(self, loss: Tensor, *, last: bool) -> None:
        raise AssertionError(f"the engine of {self.role} was prepared without an optimizer")

    def step(self) -> StepOutcome | LaterOutcome:
        raise AssertionError(f"the engine of {self.role} was prepared without an optimizer")

    def train(self) -> None:
        """Turn dropout and recomputation on."""
        self.module.train()

    def eval(self) -> None:
        """Turn dropout and recomputation off."""
        self.module.eval()


@define(kw_only=True, eq=False, slots=False)
class TrainingEngine(InferenceEngine):
    """A model that is trained."""

    schedule: LRScheduler | None
    order: GradientOrder | None
    """What reduces gradients at stages 1 and 2; None where DeepSpeed does."""
    fence: Callable[[], None]
    """Keeps gatherings of stage 3 behind an update that was launched."""
    take_step: "Callable[[TrainingEngine], StepOutcome | LaterOutcome]"
    deepspeed: Any = Factory(lambda it: it.runner, takes_self=True)
    """DeepSpeed's engine."""

    def backward(self, loss: Tensor, *, last: bool) -> None:
        """Add the gradient of `loss`; the step's `last` completes the sums. Collective."""
        self.deepspeed.set_gradient_accumulation_boundary(last)
        if self.order is not None:
            self.order.begin(last=last)
        else:
            # DeepSpeed averages over the ranks; here gradients are sums.
            loss = loss * self.mesh.shards.size
        optimizer = self.deepspeed.optimizer
        if self.precision == "fp16" and not isinstance(optimizer, ZeROOptimizer):
            # Stage 0 divides by the loss scale in its step but does not multiply by it in backward.
            loss = loss * optimizer.loss_scale
        # One rank has nothing to add up; DeepSpeed would copy gradients into buckets and back.
        is_single = self.stage == 0 and self.mesh.shards.size == 1
        with self.deepspeed.no_sync() if is_single else nullcontext():
            self.deepspeed.backward(loss, scale_wrt_gas=False)

    def step(self) -> StepOutcome | LaterOutcome:
        """Clip, update, clear the gradients, advance the schedule; see `rlhf.engine.Engine`."""
        return self.take_step(self)

    def loss_scale(self) -> float:
        """Return the scale of the gradients: above 1 only in fp16."""
        if self.precision != "fp16":
            return 1.0
        return float(self.deepspeed.optimizer.loss_scale or 1.0)
