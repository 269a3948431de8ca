"""The engine of `TorchBackend`."""

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from rlhf.engine import Mesh, Plan, StepOutcome


class TorchEngine:
    """A module and its optimizer, in the precision of the module."""

    def __init__(
        self,
        module: nn.Module,
        optimizer: Optimizer | None,
        schedule: LRScheduler | None,
        *,
        role: str,
        plan: Plan,
        mesh: Mesh,
    ) -> None:
        self.module = module.to(mesh.device)
        self.optimizer = optimizer
        self.schedule = schedule
        self.role = role
        self.plan = plan
        self.mesh = mesh
        self.device = mesh.device
        self.precision = plan.precision
        self.sharded = plan.sharded

    def __call__(self, *inputs: Any, **options: Any) -> Any:
        """Run the module's forward."""
        return self.module(*inputs, **options)

    def backward(self, loss: Tensor, *, last: bool) -> None:
        """Add the gradient of `loss`, and at the `last` micro-batch those of other ranks."""
        loss.backward()
        if last and not self.sharded:
            self.add_up_gradients()

    def add_up_gradients(self) -> None:
        """Sum the gradients of whole parameters over the ranks. Collective."""
        if self.mesh.shards.size == 1:
            return
        for parameter in self.module.parameters():
            if parameter.requires_grad:
                if parameter.grad is None:
                    # Another rank may have one.
                    parameter.grad = torch.zeros_like(parameter)
                self.mesh.shards.sum(parameter.grad)

    def step(self) -> StepOutcome:
        """Clip, update, clear the gradients, advance the schedule; a gradient that is not finite
        moves nothing."""
        assert self.optimizer is not None, f"the engine of {self.role} was prepared without one"
        trained = [item for item in self.module.parameters() if item.grad is not None]
        total = nn.utils.get_total_norm([item.grad for item in trained if item.grad is not None])
        norm = float(total.full_tensor() if isinstance(total, DTensor) else total)
        moved = math.isfinite(norm)
        if moved:
            if clip := self.plan.settings["clip"]:
                nn.utils.clip_grads_with_norm_(trained, clip, total)
            self.optimizer.step()
            if self.schedule is not None:
                self.schedule.step()
        self.optimizer.zero_grad(set_to_none=True)
        return StepOutcome(moved=moved, grad_norm=norm)

    def train(self) -> None:
        """Dropout and recomputation on."""
        self.module.train()

    def eval(self) -> None:
        """Dropout and recomputation off."""
        self.module.eval()
