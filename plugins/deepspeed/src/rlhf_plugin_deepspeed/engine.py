"""Engines around DeepSpeed's: gradients that add over ranks, a norm of one's own, and no step that
does harm."""

import copy
import itertools
import math
import platform
from collections.abc import Mapping
from typing import Any

import deepspeed
import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.base_optimizer import ZeROOptimizer
from deepspeed.runtime.zero import partition_parameters
from deepspeed.utils import z3_leaf_module
from torch import Tensor, distributed, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from rlhf.data.batch import PackedBatch
from rlhf.engine import Deferred, LaterOutcome, Mesh, Plan, Readout, StepOutcome
from rlhf_plugin_deepspeed.ahead import fence_of, run_ahead
from rlhf_plugin_deepspeed.bookkeeping import remember_parameters
from rlhf_plugin_deepspeed.broadcasts import broadcast_beside_forward
from rlhf_plugin_deepspeed.capabilities import installed_version, older
from rlhf_plugin_deepspeed.gathering import Inflight, gather_at_once, take_over
from rlhf_plugin_deepspeed.gradients import GradientReduction, take_over_reduction
from rlhf_plugin_deepspeed.leaves import mark_experts, mark_layers, reduced_by_parameter
from rlhf_plugin_deepspeed.linear import linear
from rlhf_plugin_deepspeed.optimizer import forget_first_step, rate_zero, without_masters
from rlhf_plugin_deepspeed.reductions import count_as_zeros, lighten_reductions
from rlhf_plugin_deepspeed.rounding import RoundedAdamW

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
CLIP_EPS = 1e-6
"""Added to the norm that a gradient is divided by, as DeepSpeed does at the other stages."""
LOOKS = "0.19.8"
"""The first DeepSpeed that looks at the gradient's norm before a sharded step in every precision.
"""

# What DeepSpeed puts in the place of torch's, for the whole process.
partition_parameters.zero3_linear_wrap = linear


class InferenceEngine:
    """A model that is run and never trained: a reference, a teacher."""

    def __init__(
        self, module: nn.Module, *, runner: nn.Module, role: str, plan: Plan, mesh: Mesh
    ) -> None:
        self._module = module
        self.runner = runner
        """What is called: DeepSpeed's engine at stage 3, else the module itself."""
        self.role = role
        self.stage = plan.stage
        self.precision = plan.precision
        self.device = mesh.device
        self.mesh = mesh

    @property
    def module(self) -> Any:
        """What was prepared, unwrapped."""
        return self._module

    def __call__(self, batch: PackedBatch, readout: Readout) -> Mapping[str, Tensor]:
        """Run the wrapped forward; collective at stage 3."""
        return self.runner(batch, readout)

    def backward(self, loss: Tensor, *, last: bool) -> None:
        raise AssertionError(f"the engine of {self.role} was prepared without an optimizer")

    def step(self) -> StepOutcome | LaterOutcome:
        raise AssertionError(f"the engine of {self.role} was prepared without an optimizer")

    def train(self) -> None:
        """Dropout and recomputation on."""
        self._module.train()

    def eval(self) -> None:
        """Dropout and recomputation off."""
        self._module.eval()


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
        clip: float,
        role: str,
        plan: Plan,
        mesh: Mesh,
    ) -> None:
        super().__init__(module, runner=runner, role=role, plan=plan, mesh=mesh)
        self.deepspeed = runner
        self.clip = clip
        """Largest norm of the gradient, or 0; where `plain` or `rounded`, clipping is ours."""
        self.plain = runner.optimizer is runner.basic_optimizer
        """Whether torch's optimizer itself takes the step (stage 0 without masters): nothing in
        DeepSpeed then looks at the gradient."""
        self.stage = runner.zero_optimization_stage()
        self.schedule = schedule
        self.masters = masters
        """Names of the trained parameters in the optimizer's groups, in its order."""
        base = runner.basic_optimizer
        self.rounded = base if isinstance(base, RoundedAdamW) else None
        """What leaves a step out by itself where the norm is not finite."""
        early = older(installed_version(), LOOKS)
        self._blind = early and self.precision != "fp16"
        if self.stage == 3:
            gather_at_once(runner.optimizer)
            lighten_reductions(runner.optimizer)
            count_as_zeros(runner.optimizer)
            _pass_sooner(runner.optimizer.parameter_offload, module)
            self._fence = fence_of(runner.optimizer.parameter_offload)
        # To send to or from one rank is fast where all are linked alike, on one host.
        on_one_host = len(set(mesh.gather(platform.node()))) == 1
        self._reduction: GradientReduction | None = None
        if self.stage in (1, 2):
            self._reduction = take_over_reduction(runner.optimizer, module, to_owners=on_one_host)
        offloaded = runner.zero_offload_optimizer() is not None
        self._weights = None
        if self.stage in (1, 2) and mesh.world > 1 and on_one_host and not offloaded:
            self._weights = broadcast_beside_forward(runner.optimizer, module)
        if self.rounded is not None and self.stage > 0:
            _look_nowhere(runner.optimizer)
        elif self.stage in (1, 2):
            _look_once(runner.optimizer, blind=early)
        elif self.stage == 3 and not runner.optimizer.offload_optimizer:
            runner.optimizer._get_norm_groups = lambda: [_told_norm(runner.optimizer)]

    @property
    def module(self) -> Any:
        """What was prepared, unwrapped, with the weights of the last step."""
        self.wait_for_weights()
        return self._module

    def backward(self, loss: Tensor, *, last: bool) -> None:
        """Add the gradient of `loss`, to be summed over ranks with the step's `last` micro-batch.
        Collective."""
        self.deepspeed.set_gradient_accumulation_boundary(last)
        if self._reduction is not None:
            self._reduction.begin(last=last)
        else:
            # DeepSpeed averages over the ranks; here gradients are sums.
            loss = loss * self.mesh.world
        optimizer = self.deepspeed.optimizer
        if self.precision == "fp16" and not isinstance(optimizer, ZeROOptimizer):
            # Stage 0 divides by the loss scale in its step but does not multiply by it in backward.
            loss = loss * optimizer.loss_scale
        self.deepspeed.backward(loss, scale_wrt_gas=False)

    def step(self) -> StepOutcome | LaterOutcome:
        """Clip, update, clear the gradients, advance the schedule. A gradient that is not finite on
        some rank moves no weight."""
        self.wait_for_weights()
        scale = self._loss_scale()
        if self.rounded is not None:
            return self._rounded_step(self.rounded)
        norm = float(self._whole_norm()) / scale if self.stage == 0 else None
        if self.plain and norm is not None:
            if not math.isfinite(norm):
                self.deepspeed.zero_grad()
                return StepOutcome(moved=False, grad_norm=norm)
            if self.clip and norm > self.clip:
                torch._foreach_mul_(self._gradients(), self.clip / (norm + CLIP_EPS))
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
        if self.stage == 3:
            self._fence()
        if norm is None:
            norm = float(self.deepspeed.get_global_grad_norm())
            if not moved and math.isfinite(norm):
                # Before 0.19.8 a step that is left out keeps the norm of the one before it.
                norm = math.inf
        if moved and self.stage == 3:
            # It divides the norm by the scale after that has grown for the next step.
            norm *= self._loss_scale() / scale
        return StepOutcome(moved=moved, grad_norm=norm, skipped_by_scaler=by_scaler)

    def _rounded_step(self, optimizer: RoundedAdamW) -> LaterOutcome:
        """Norm, clipping and update without waiting for the device."""
        norm = self._whole_norm() if self.stage == 0 else _sharded_norm(self.deepspeed.optimizer)
        factor = ((self.clip or math.inf) / (norm + CLIP_EPS)).clamp(max=1.0)
        optimizer.factor = torch.where(norm.isfinite(), factor, torch.nan)
        self.deepspeed.step()
        if self.stage == 3:
            self._fence()
        if self.schedule is not None:
            self.schedule.step()
        return LaterOutcome(Deferred(norm[None]))

    def wait_for_weights(self) -> None:
        """Have what is launched from here on come after the last weight of the last step is there:
        for whoever reads or changes weights outside of a forward pass."""
        if self._weights is not None:
            self._weights.wait()

    def _whole_norm(self) -> Tensor:
        """The norm at stage 0, where every rank holds the whole gradient: DeepSpeed tells none
        without masters and, with torch's optimizer, a scaled one in fp16."""
        norms = torch._foreach_norm(self._gradients(), 2, dtype=torch.float32)
        return torch.linalg.vector_norm(torch.stack(norms))

    def _gradients(self) -> list[Tensor]:
        """Those of all trained parameters; zeros where this step gave none, as DeepSpeed has it
        where it adds them up over ranks."""
        trained = [item for item in self._module.parameters() if item.requires_grad]
        for parameter in trained:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        return [item.grad for item in trained if item.grad is not None]

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
    layers = _unify(model, plan)
    masters = _names(model, optimizer)
    with rate_zero(optimizer), reduced_by_parameter(layers):
        # DeepSpeed writes into the dictionary it is given; the plan stays as it was recorded.
        settings = copy.deepcopy(plan.settings)
        clip = settings["gradient_clipping"]
        plain = not any(settings[name]["enabled"] for name in ("bf16", "fp16"))
        if plan.stage == 0 and plain:
            # Its own takes a loop over all gradients, twice.
            settings["gradient_clipping"] = 0.0
        if plan.stage == 3:
            # Gradients are laid side by side for their reduction, so that a buffer for them is a
            # copy too many. Without it DeepSpeed's own way of keeping shards, for an optimizer on
            # the host, gives the memory of a gradient that has an empty shard back while it is
            # still read on another stream. (And a gradient that fills a bucket alone is divided in
            # place: embeddings and heads, whose gradients are their own.)
            zero = settings["zero_optimization"]
            apart = "offload_optimizer" in zero
            zero["contiguous_gradients"] = apart and _some_empty(model, mesh.world)
        runner, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=settings)
    if plan.stage == 0 and plain:
        # On one rank it would copy the gradients into buckets and back to add up nothing.
        runner.enable_backward_allreduce = mesh.world > 1
    elif plan.stage == 0:
        forget_first_step(optimizer)
    elif plan.stage in (1, 2) and isinstance(optimizer, RoundedAdamW):
        without_masters(runner.optimizer)
    scaler = getattr(runner.optimizer, "loss_scaler", None)
    if scaler is not None:
        # At its floor it would raise an Exception of no type; the loop says it with step and rows.
        scaler.raise_error_at_min_scale = False
    return TrainingEngine(
        model,
        runner=runner,
        schedule=schedule,
        masters=masters,
        clip=clip,
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
        _pass_sooner(runner.optimizer, model)
    return InferenceEngine(model, runner=runner, role=role, plan=plan, mesh=mesh)


def _look_once(optimizer: Any, *, blind: bool) -> None:
    """Have stages 1 and 2 look at the gradient in every precision, and only once.

    From 0.19.8 on they find what is not finite by its norm. They also look at each parameter's
    gradient by itself, ten launches and three passes for each; a `blind` DeepSpeed, before 0.19.8,
    needs that.
    """
    optimizer.check_grad_overflow = True
    if not blind and not optimizer.cpu_offload:
        optimizer.check_overflow = lambda partition_gradients=True: None
        optimizer.scaled_global_norm = lambda norm_type=2: _told_norm(optimizer)


def _look_nowhere(optimizer: Any) -> None:
    """Have DeepSpeed take every step as it is: the update under it scales the gradient, and leaves
    out what is not finite. The norm that DeepSpeed knows is then 1."""
    optimizer.check_grad_overflow = False
    optimizer.scaled_global_norm = lambda norm_type=2: torch.ones(())
    optimizer._get_norm_groups = lambda: [torch.ones(())]
    optimizer.unscale_and_clip_grads = lambda *arguments: None


def _told_norm(optimizer: Any) -> Tensor:
    """The norm as DeepSpeed wants to look at it, -1 where it is not finite. Its own stays on the
    device, so that the host waits for it after the update again; this one is on the host."""
    norm = _sharded_norm(optimizer)
    return torch.where(norm.isfinite(), norm, -1.0).cpu()


def _sharded_norm(optimizer: Any) -> Tensor:
    """The norm of the gradient over all ranks, each rank giving its shards. DeepSpeed's own takes a
    copy in float64 and three launches for each parameter. Collective."""
    groups = optimizer.averaged_gradients.values()
    every = itertools.chain.from_iterable(groups)
    shards = [item for item in every if not getattr(item, "_zero_padding", False)]
    total = torch.zeros((), dtype=torch.float32, device=get_accelerator().current_device_name())
    if shards:
        norms = torch._foreach_norm(shards, 2, dtype=torch.float32)
        total += torch.stack(list(norms)).square().sum()
    distributed.all_reduce(total, group=optimizer.dp_process_group)
    return total.sqrt()


def _unify(model: nn.Module, plan: Plan) -> list[nn.Module]:
    """One dtype for what trains: adapters come in fp32, which ZeRO-3 would mix with weights of the
    plan's. Returns the layers that ZeRO-3 gathers as one."""
    dtype = DTYPES[plan.precision]
    for parameter in model.parameters():
        if parameter.is_floating_point() and not hasattr(parameter, "ds_id"):
            parameter.data = parameter.data.to(dtype).contiguous()
    if plan.stage < 3:
        return []
    model.ds_inflight_param_registry = Inflight()
    mark_experts(model)
    return mark_layers(model)


def _pass_sooner(offload: Any, model: nn.Module) -> None:
    """Have the passes of `model` at stage 3 take less of the host, and let it be ahead of the
    device."""
    remember_parameters(model)
    take_over(offload)
    leaves: list[Any] = [module for module in model.modules() if z3_leaf_module(module)]
    sizes = [sum(item.ds_numel for item in module.parameters()) for module in leaves]
    run_ahead(offload, layer=max(sizes, default=0))


def _some_empty(model: nn.Module, ranks: int) -> bool:
    """Whether a rank's shard of some parameter has no element."""
    sizes = [getattr(item, "ds_numel", item.numel()) for item in model.parameters()]
    return any(-(-size // ranks) * (ranks - 1) >= size for size in sizes)


def _names(model: nn.Module, optimizer: Optimizer) -> list[list[str]]:
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    return [[names[id(item)] for item in group["params"]] for group in optimizer.param_groups]
