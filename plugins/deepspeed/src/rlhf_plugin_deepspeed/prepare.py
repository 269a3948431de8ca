"""From a model and its plan to an engine."""

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import deepspeed
import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils._pytree import tree_leaves

from rlhf.engine import Mesh, register_sharding
from rlhf.errors import RLHFError
from rlhf_optim import RoundedAdamW
from rlhf_plugin_deepspeed.checkpoint import pieces
from rlhf_plugin_deepspeed.engine import InferenceEngine, TrainingEngine
from rlhf_plugin_deepspeed.leaves import mark_experts, mark_layers, reduced_by_parameter
from rlhf_plugin_deepspeed.mesh import groups_of
from rlhf_plugin_deepspeed.muon import Exchange, Muon
from rlhf_plugin_deepspeed.nvme import StateFiles, is_in_file, state_files
from rlhf_plugin_deepspeed.optimizer import forget_first_step, rate_zero
from rlhf_plugin_deepspeed.partial import keep_on_accelerator
from rlhf_plugin_deepspeed.patches.gathering import prepare_gathering
from rlhf_plugin_deepspeed.patches.install import replace, run_scope
from rlhf_plugin_deepspeed.patches.stage_3 import by_dtype, patch_stage_3
from rlhf_plugin_deepspeed.patches.stages_1_and_2 import patch_stages_1_and_2
from rlhf_plugin_deepspeed.plans import ZeroPlan
from rlhf_plugin_deepspeed.stepping import CHECKS_BY_NORM, choose_step, has_masters
from rlhf_plugin_deepspeed.tensor import divide
from rlhf_plugin_deepspeed.versions import installed_version, older
from rlhf_plugin_deepspeed.weights import BackendSharding, sharded_creation


def prepare_training(
    model: nn.Module,
    optimizer: Optimizer,
    schedule: LRScheduler | None,
    *,
    role: str,
    plan: ZeroPlan,
    mesh: Mesh,
) -> TrainingEngine:
    """Return an engine that trains `model`. Collective."""
    layers = _divide(model, plan, mesh)
    fp32 = [item for item in model.parameters() if item.dtype == torch.float32]
    if plan.precision == "fp32":
        fp32 = []
    settings = _settings(model, plan, mesh, rounded=isinstance(optimizer, RoundedAdamW))
    if any(item.requires_grad for item in fp32) and plan.stage == 3:
        # Gradients that are reduced together need one dtype, which the buffer gives them.
        settings["zero_optimization"]["contiguous_gradients"] = True
    files = state_files(plan)
    buffers = dict(model.named_buffers(remove_duplicate=False))
    with files, rate_zero(optimizer), reduced_by_parameter(layers), by_dtype(plan):
        runner, *_ = deepspeed.initialize(
            model=model,
            optimizer=_uncast(fp32, optimizer) if fp32 and plan.stage < 3 else optimizer,
            config=settings,
            mpu=groups_of(mesh) if mesh.tensor.size > 1 else None,
        )
    for name, value in buffers.items():
        buffer = model.get_buffer(name)
        if buffer.dtype != value.dtype:  # DeepSpeed before 0.19.3 casts them too.
            buffer.data = value.to(mesh.device)
    # Its hooks would keep the weights and the process groups in memory after the run.
    run_scope.callback(runner.destroy)
    if plan.stage == 3 and "offload_optimizer" in plan.settings["zero_optimization"]:
        keep_on_accelerator(runner.optimizer, plan, mesh.device)
    if plan.stage == 0 and has_masters(plan):
        forget_first_step(runner.basic_optimizer)
    scaler = getattr(runner.optimizer, "loss_scaler", None)
    if scaler is not None and plan.precision == "fp16":
        replace("scaler-floor", scaler, raise_error_at_min_scale=False)
    engine = TrainingEngine(
        module=model,
        runner=runner,
        role=role,
        plan=plan,
        mesh=mesh,
        schedule=schedule,
        order=patch_stages_1_and_2(runner.optimizer, model, plan),
        fence=patch_stage_3(runner.optimizer, plan),
        take_step=choose_step(runner, plan),
    )
    if isinstance(files, StateFiles):
        assert all(is_in_file(piece.master) for piece in pieces(engine) if piece.size)
    if isinstance(optimizer, Muon):
        optimizer.exchange = Exchange(list(pieces(engine)), plan, mesh)
    return engine


def prepare_inference(
    model: nn.Module, *, role: str, plan: ZeroPlan, mesh: Mesh
) -> InferenceEngine:
    """Return an engine that only runs `model`; below stage 3 it needs no DeepSpeed. Collective."""
    model.requires_grad_(False)
    model.eval()
    _divide(model, plan, mesh)
    if plan.stage < 3:
        runner: nn.Module = model.to(mesh.device)
    else:
        model.register_forward_hook(partial(_refuse_gradient, role))
        with state_files(plan):
            runner, *_ = deepspeed.initialize(model=model, config=copy.deepcopy(plan.settings))
    return InferenceEngine(module=model, runner=runner, role=role, plan=plan, mesh=mesh)


def _refuse_gradient(role: str, _: nn.Module, inputs: Any, outputs: Any) -> None:
    """Raise RLHFError if a frozen model's results have a graph; DeepSpeed's error would mislead."""
    if any(isinstance(item, torch.Tensor) and item.requires_grad for item in tree_leaves(outputs)):
        raise RLHFError(
            f"a gradient flows through the {role}, which is frozen and in shards; detach what the "
            "trainer passes to it, or set deepspeed.frozen to 0"
        )


def _uncast(fp32: list[nn.Parameter], optimizer: Optimizer) -> Callable[[Any], Optimizer]:
    """Return what DeepSpeed asks for the optimizer, after it has cast all parameters: those in
    `fp32` get their values back first."""
    values = [item.data for item in fp32]

    def built(_: Any) -> Optimizer:
        for item, value in zip(fp32, values, strict=True):
            item.data = value.to(item.device)
        values.clear()  # DeepSpeed keeps this function.
        return optimizer

    return built


def _settings(model: nn.Module, plan: ZeroPlan, mesh: Mesh, *, rounded: bool) -> dict[str, Any]:
    """Return a copy of the plan's settings for training, since DeepSpeed writes into it."""
    settings = copy.deepcopy(plan.settings)
    zero = settings["zero_optimization"]
    # DeepSpeed would make a second optimizer.
    zero.get("offload_optimizer", {}).pop("ratio", None)
    if rounded or (plan.stage == 0 and (mesh.tensor.size > 1 or not has_masters(plan))):
        # Clipped by the update over bf16 states, or by our step; DeepSpeed's clipping at stage 0
        # takes a loop over all gradients, twice.
        settings["gradient_clipping"] = 0.0
    if rounded and plan.stage in (1, 2) and not older(installed_version(), CHECKS_BY_NORM):
        # The update skips what is not finite by itself.
        settings["bf16"]["check_grad_overflow"] = False
        zero["compute_grad_norm"] = False
    if plan.stage == 3:
        # Gradients are laid side by side for their reduction, so a buffer for them is one copy too
        # many. But without the buffer DeepSpeed releases the memory of a gradient that has an empty
        # shard while another stream still reads it. (It also divides a gradient that fills a bucket
        # by itself in place: only those of embeddings and heads, which nothing else reads.)
        zero["contiguous_gradients"] = _some_empty(model, mesh.shards.size)
    return settings


def _divide(model: nn.Module, plan: ZeroPlan, mesh: Mesh) -> list[nn.Module]:
    """Divide `model` as planned. Returns the layers that ZeRO-3 gathers as one."""
    for parameter in model.parameters():
        if parameter.is_floating_point() and not hasattr(parameter, "ds_id"):
            parameter.data = parameter.data.contiguous()
    if plan.tensor > 1:
        register_sharding(BackendSharding())
        divide(model, mesh.tensor)
    if plan.stage < 3:
        return []
    if not any(hasattr(parameter, "ds_id") for parameter in model.parameters()):
        with sharded_creation(plan, mesh, model):
            pass
    if "gathering" in plan.patches:
        prepare_gathering(model)
    mark_experts(model)
    return mark_layers(model, plan.patches)


def _some_empty(model: nn.Module, ranks: int) -> bool:
    """Return whether a rank's shard of some parameter has no element."""
    sizes = [getattr(item, "ds_numel", item.numel()) for item in model.parameters()]
    return any(-(-size // ranks) * (ranks - 1) >= size for size in sizes)
