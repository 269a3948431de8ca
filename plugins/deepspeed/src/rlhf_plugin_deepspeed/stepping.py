"""The ways in which an engine takes an optimizer step."""

import math
from collections.abc import Callable
from typing import Any

import torch
from attrs import evolve
from torch import Tensor, nn

from rlhf.engine import Axis, Deferred, LaterOutcome, StepOutcome
from rlhf_optim import RoundedAdamW
from rlhf_plugin_deepspeed.engine import TrainingEngine
from rlhf_plugin_deepspeed.nvme import state_files
from rlhf_plugin_deepspeed.patches.checks import sharded_norm
from rlhf_plugin_deepspeed.plans import ZeroPlan
from rlhf_plugin_deepspeed.tensor import part_of
from rlhf_plugin_deepspeed.versions import installed_version, older

CHECKS_BY_NORM = "0.19.8"
"""The first DeepSpeed that checks the norm in every precision, and that can leave it out."""
CLIP_EPS = 1e-6
"""Added to the norm that a gradient is divided by, as in DeepSpeed's own clipping."""


def choose_step(
    runner: Any, plan: ZeroPlan
) -> Callable[[TrainingEngine], StepOutcome | LaterOutcome]:
    """Return how `runner`, DeepSpeed's engine, takes a step."""
    if isinstance(runner.basic_optimizer, RoundedAdamW):
        return rounded_step
    if plan.stage == 0:
        return mastered_step if has_masters(plan) else plain_step
    return sharded_step if plan.stage < 3 else stage_3_step


def has_masters(plan: ZeroPlan) -> bool:
    """Return whether DeepSpeed keeps masters at stage 0; else torch's optimizer takes the step."""
    return any(plan.settings[name]["enabled"] for name in ("bf16", "fp16"))


def plain_step(engine: TrainingEngine) -> StepOutcome:
    """Step with torch's own optimizer, stage 0 in fp32: DeepSpeed neither checks nor clips."""
    norm = float(whole_norm(engine.module, engine.mesh.tensor))
    if not math.isfinite(norm):
        engine.deepspeed.zero_grad()
        return StepOutcome(moved=False, grad_norm=norm)
    clip = engine.plan.settings["gradient_clipping"]
    if clip and norm > clip:
        torch._foreach_mul_(gradients(engine.module), clip / (norm + CLIP_EPS))
    moved, _ = _update(engine)
    return StepOutcome(moved=moved, grad_norm=norm)


def mastered_step(engine: TrainingEngine) -> StepOutcome:
    """Step over fp32 masters at stage 0, in bf16 and fp16."""
    norm = float(whole_norm(engine.module, engine.mesh.tensor)) / engine.loss_scale()
    if engine.precision == "bf16" and not math.isfinite(norm):
        # Before 0.19.8 DeepSpeed updates all the same.
        engine.deepspeed.zero_grad()
        return StepOutcome(moved=False, grad_norm=norm)
    if engine.mesh.tensor.size > 1:
        # DeepSpeed clips by a norm that counts flat gradients on one rank of the axis.
        clip = engine.plan.settings["gradient_clipping"] or math.inf
        torch._foreach_mul_(gradients(engine.module), min(1.0, clip / (norm + CLIP_EPS)))
    moved, skipped = _update(engine)
    return StepOutcome(moved=moved, grad_norm=norm, skipped_by_scaler=skipped)


def sharded_step(engine: TrainingEngine) -> StepOutcome:
    """Step over shards of the optimizer's states, stages 1 and 2."""
    moved, skipped = _update(engine)
    norm = float(engine.deepspeed.get_global_grad_norm())
    if not moved and math.isfinite(norm):
        # Before 0.19.8 a skipped step keeps the norm of the step before it.
        norm = math.inf
    return StepOutcome(moved=moved, grad_norm=norm, skipped_by_scaler=skipped)


def stage_3_step(engine: TrainingEngine) -> StepOutcome:
    """Step over shards of the weights."""
    scale = engine.loss_scale()
    if engine.precision != "fp16" and older(installed_version(), CHECKS_BY_NORM):
        # DeepSpeed skips the step if this finds a gradient that is not finite.
        engine.deepspeed.optimizer.check_overflow()
    outcome = sharded_step(engine)
    # DeepSpeed divides by the scale after it has grown for the next step.
    growth = engine.loss_scale() / scale if outcome.moved else 1.0
    return evolve(outcome, grad_norm=outcome.grad_norm * growth)


def rounded_step(engine: TrainingEngine) -> LaterOutcome:
    """Step with `RoundedAdamW`, which clips and skips on the device. The host waits only at stage 3
    without the patch `no-norm`: DeepSpeed checks the gradient too."""
    if engine.stage == 0:
        norm = whole_norm(engine.module, engine.mesh.tensor)
    else:
        norm = sharded_norm(engine.deepspeed.optimizer)
    clip = engine.plan.settings["gradient_clipping"] or math.inf
    factor = (clip / (norm + CLIP_EPS)).clamp(max=1.0)
    engine.deepspeed.basic_optimizer.factor = torch.where(norm.isfinite(), factor, torch.nan)
    engine.deepspeed.step()
    engine.fence()
    if engine.schedule is not None:
        engine.schedule.step()
    return LaterOutcome(Deferred(norm[None]))


def _update(engine: TrainingEngine) -> tuple[bool, bool]:
    """Let DeepSpeed update; returns whether weights moved, and whether the loss scaler skipped."""
    scale = engine.loss_scale()
    with state_files(engine.plan):
        engine.deepspeed.step()
    engine.fence()
    moved = engine.deepspeed.was_step_applied()
    # A scale that can fall is to blame; at its floor the gradient itself is bad.
    skipped = not moved and engine.loss_scale() < scale
    if engine.schedule is not None and (moved or skipped):
        # Step k of N has the rate f(k / N), whether or not step k - 1 moved.
        engine.schedule.step()
    return moved, skipped


def whole_norm(module: nn.Module, axis: Axis) -> Tensor:
    """Return the norm of the gradient at stage 0. Collective over the tensor axis. DeepSpeed has
    none without masters, and with torch's optimizer in fp16 a scaled one."""
    counted = gradients(module)
    if axis.rank > 0:
        # What tensor ranks hold alike counts on the first.
        trained = (item for item in module.parameters() if item.requires_grad)
        counted = [grad for grad, item in zip(counted, trained, strict=True) if part_of(item)]
        counted = counted or [torch.zeros((), device=next(module.parameters()).device)]
    norms = torch._foreach_norm(counted, 2, dtype=torch.float32)
    norm = torch.linalg.vector_norm(torch.stack(norms))
    return norm if axis.size == 1 else axis.sum(norm.square()).sqrt()


def gradients(module: nn.Module) -> list[Tensor]:
    """Return the gradients of all trained parameters; where a step gave none, zeros, which
    DeepSpeed uses too when it adds gradients up over ranks."""
    trained = [item for item in module.parameters() if item.requires_grad]
    for parameter in trained:
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
    return [item.grad for item in trained if item.grad is not None]
