"""Engines around DeepSpeed's: gradients that add over ranks, a norm of one's own, and no step that
does harm."""

import copy
import math
from collections.abc import Mapping
from typing import Any

import deepspeed
import torch
from deepspeed.runtime.base_optimizer import ZeROOptimizer
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from rlhf.data.batch import PackedBatch
from rlhf.engine import Mesh, Plan, Readout, StepOutcome
from rlhf_plugin_deepspeed.capabilities import installed_version, older
from rlhf_plugin_deepspeed.leaves import mark_experts
from rlhf_plugin_deepspeed.optimizer import forget_first_step, rate_zero

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
LOOKS = "0.19.8"
"""The first DeepSpeed that looks at the gradient's norm before a sharded step in every precision.
"""


class InferenceEngine:
    """A model that is run and never trained: a reference, a teacher."""

    def __init__(
        self, module: nn.Module, *, runner: nn.Module, role: str, plan: Plan, mesh: Mesh
    ) -> None:
        self.module = module
        self.runner = runner
        """What is called: DeepSpeed's engine at stage 3, else the module itself."""
        self.role = role
        self.stage = plan.stage
        self.precision = plan.precision
        self.device = mesh.device
        self.mesh = mesh

    def __call__(self, batch: PackedBatch, readout: Readout) -> Mapping[str, Tensor]:
        """Run the wrapped forward; collective at stage 3."""
        return self.runner(batch, readout)

    def backward(self, loss: Tensor, *, last: bool) -> None:
        raise AssertionError(f"the engine of {self.role} was prepared without an optimizer")

    def step(self) -> StepOutcome:
        raise AssertionError(f"the engine of {self.role} was prepared without an optimizer")

    def train(self) -> None:
        """Dropout and recomputation on."""
        self.module.train()

    def eval(self) -> None:
        """Dropout and recomputation off."""
        self.module.eval()


class TrainingEngine(InferenceEngine):
    """A model that is trained. `deepspeed` is DeepSpeed's engine, the truth about stage and
    scale."""

    def __init__(
        self,
        module: nn.Module,
        *,
        runner: Any,
        schedule: LRScheduler | None,
        masters: list[list[str]],
        role: str,
        plan: Plan,
        mesh: Mesh,
    ) -> None:
        super().__init__(module, runner=runner, role=role, plan=plan, mesh=mesh)
        self.deepspeed = runner
        self.stage = runner.zero_optimization_stage()
        self.schedule = schedule
        self.masters = masters
        """Names of the trained parameters in the optimizer's groups, in its order."""
        self._blind = older(installed_version(), LOOKS) and self.precision != "fp16"
        if self._blind and self.stage in (1, 2):
            runner.optimizer.check_grad_overflow = True

    def backward(self, loss: Tensor, *, last: bool) -> None:
        """Add the gradient of `loss`, to be summed over ranks with the step's `last` micro-batch.
        Collective."""
        self.deepspeed.set_gradient_accumulation_boundary(last)
        # DeepSpeed averages over the ranks; here gradients are sums.
        loss = loss * self.mesh.world
        optimizer = self.deepspeed.optimizer
        if self.precision == "fp16" and not isinstance(optimizer, ZeROOptimizer):
            # Stage 0 divides by the loss scale in its step but does not multiply by it in backward.
            loss = loss * optimizer.loss_scale
        self.deepspeed.backward(loss, scale_wrt_gas=False)

    def step(self) -> StepOutcome:
        """Clip, update, clear the gradients, advance the schedule. A gradient that is not finite on
        some rank moves no weight."""
        scale = self._loss_scale()
        norm = self._whole_norm() / scale if self.stage == 0 else None
        if self.precision == "fp32" and norm is not None and not math.isfinite(norm):
            # Stage 0 in fp32 is torch's optimizer itself: nothing in DeepSpeed looks at the
            # gradient.
            self.deepspeed.zero_grad()
            return StepOutcome(moved=False, grad_norm=norm)
        if self._blind and self.stage == 3:
            # Whatever this finds makes DeepSpeed leave the step out.
            self.deepspeed.optimizer.check_overflow()
        self.deepspeed.step()
        moved = self.deepspeed.was_step_applied()
        # Where the scale could fall the scaler must find it; at its floor the gradient itself is
        # bad.
        by_scaler = not moved and self.precision == "fp16" and self._loss_scale() < scale
        if self.schedule is not None and (moved or by_scaler):
            # Step k of N has the rate f(k / N), whatever became of step k - 1.
            self.schedule.step()
        if norm is None:
            norm = float(self.deepspeed.get_global_grad_norm())
            if not moved and math.isfinite(norm):
                # Before 0.19.8 a step that is left out keeps the norm of the one before it.
                norm = math.inf
        if moved and self.stage == 3:
            # It divides the norm by the scale after that has grown for the next step.
            norm *= self._loss_scale() / scale
        return StepOutcome(moved=moved, grad_norm=norm, skipped_by_scaler=by_scaler)

    def _whole_norm(self) -> float:
        """The norm at stage 0, where every rank holds the whole gradient: DeepSpeed tells none in
        fp32 and, with torch's optimizer, a scaled one in fp16."""
        norms = [
            torch.linalg.vector_norm(item.grad, dtype=torch.float32)
            for item in self.module.parameters()
            if item.grad is not None
        ]
        return float(torch.linalg.vector_norm(torch.stack(norms)))

    def _loss_scale(self) -> float:
        return (
            float(self.deepspeed.optimizer.loss_scale or 1.0) if self.precision == "fp16" else 1.0
        )


def prepare_training(
    model: nn.Module,
    optimizer: Optimizer,
    schedule: LRScheduler | None,
    *,
    role: str,
    plan: Plan,
    mesh: Mesh,
) -> TrainingEngine:
    """An engine that trains `model`. Collective."""
    _unify(model, plan)
    masters = _names(model, optimizer)
    with rate_zero(optimizer):
        # DeepSpeed writes into the dictionary it is given; the plan stays as it was recorded.
        settings = copy.deepcopy(plan.settings)
        runner, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=settings)
    if plan.stage == 0 and plan.precision != "fp32":
        forget_first_step(optimizer)
    scaler = getattr(runner.optimizer, "loss_scaler", None)
    if scaler is not None:
        # At its floor it would raise an Exception of no type; the loop says it with step and rows.
        scaler.raise_error_at_min_scale = False
    return TrainingEngine(
        model,
        runner=runner,
        schedule=schedule,
        masters=masters,
        role=role,
        plan=plan,
        mesh=mesh,
    )


def prepare_inference(model: nn.Module, *, role: str, plan: Plan, mesh: Mesh) -> InferenceEngine:
    """An engine that runs `model` alone; below stage 3 no DeepSpeed is needed for that.
    Collective."""
    model.requires_grad_(False)
    model.eval()
    _unify(model, plan)
    if plan.stage < 3:
        runner: nn.Module = model.to(mesh.device)
    else:
        settings = copy.deepcopy(plan.settings)
        settings["zero_optimization"].pop("offload_optimizer", None)
        settings["bf16"].pop("bf16_master_weights_and_grads", None)
        settings["bf16"].pop("bf16_optimizer_states", None)
        runner, *_ = deepspeed.initialize(model=model, config=settings)
    return InferenceEngine(model, runner=runner, role=role, plan=plan, mesh=mesh)


def _unify(model: nn.Module, plan: Plan) -> None:
    """One dtype for what trains: adapters come in fp32, which ZeRO-3 would mix with weights of the
    plan's."""
    dtype = DTYPES[plan.precision]
    for parameter in model.parameters():
        if parameter.is_floating_point() and not hasattr(parameter, "ds_id"):
            parameter.data = parameter.data.to(dtype)
    if plan.stage == 3:
        mark_experts(model)


def _names(model: nn.Module, optimizer: Optimizer) -> list[list[str]]:
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    return [[names[id(item)] for item in group["params"]] for group in optimizer.param_groups]
