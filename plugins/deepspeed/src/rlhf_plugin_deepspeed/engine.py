"""Engines around DeepSpeed's: gradients that add over ranks, and no step that does harm."""

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

from deepspeed.runtime.base_optimizer import ZeROOptimizer
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler

from rlhf.engine import LaterOutcome, Mesh, Plan, StateKind, StepOutcome
from rlhf_plugin_deepspeed.patches.stages_1_and_2 import GradientOrder


class InferenceEngine:
    """A model that is run and never trained: a reference, a teacher."""

    def __init__(
        self, module: nn.Module, *, runner: nn.Module, role: str, plan: Plan, mesh: Mesh
    ) -> None:
        self.module: Any = module
        """What was prepared, unwrapped."""
        self.runner = runner
        """What is called: DeepSpeed's engine at stage 3, else the module itself."""
        self.role = role
        self.stage = plan.stage
        self.precision = plan.precision
        self.device = mesh.device
        self.mesh = mesh
        self.on_host: dict[StateKind, list[Any]] = {}
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


class TrainingEngine(InferenceEngine):
    """A model that is trained. `deepspeed` is DeepSpeed's engine."""

    def __init__(
        self,
        module: nn.Module,
        *,
        runner: Any,
        schedule: LRScheduler | None,
        order: GradientOrder | None,
        fence: Callable[[], None],
        take_step: "Callable[[TrainingEngine], StepOutcome | LaterOutcome]",
        role: str,
        plan: Plan,
        mesh: Mesh,
    ) -> None:
        super().__init__(module, runner=runner, role=role, plan=plan, mesh=mesh)
        self.deepspeed = runner
        self.schedule = schedule
        self.clip = plan.settings["gradient_clipping"]
        """Largest norm of the gradient, or 0; for the steps that clip here and not in DeepSpeed."""
        self.order = order
        """What reduces gradients at stages 1 and 2; None where DeepSpeed does."""
        self.fence = fence
        """Keeps gatherings of stage 3 behind an update that was launched."""
        self._take_step = take_step

    def backward(self, loss: Tensor, *, last: bool) -> None:
        """Add the gradient of `loss`, to be summed over ranks with the step's `last` micro-batch.
        Collective."""
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
        """Clip, update, clear the gradients, advance the schedule. A gradient that is not finite on
        some rank moves no weight."""
        return self._take_step(self)

    def loss_scale(self) -> float:
        """Return the scale of the gradients: above 1 only in fp16."""
        if self.precision != "fp16":
            return 1.0
        return float(self.deepspeed.optimizer.loss_scale or 1.0)
