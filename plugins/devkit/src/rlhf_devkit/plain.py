"""The plain backend: one process, plain torch, fp32, on the CPU."""

import math
import os
import random
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer
from torch.optim.lr_scheduler import LRScheduler

from rlhf.engine import (
    EngineState,
    Fragment,
    Mesh,
    ModelShape,
    Plan,
    SavedState,
    StepOutcome,
)
from rlhf.errors import RLHFError
from rlhf.hookspecs import Finding, hookimpl
from rlhf.plugin import Config


class PlainEngine:
    """A module and its optimizer."""

    sharded = False
    precision = "fp32"

    def __init__(
        self,
        module: nn.Module,
        optimizer: Optimizer | None,
        schedule: LRScheduler | None,
        *,
        role: str,
        clip: float,
        device: torch.device,
    ) -> None:
        self.module = module.to(device)
        self.optimizer = optimizer
        self.schedule = schedule
        self.role = role
        self.clip = clip
        self.device = device

    def __call__(self, *inputs: Any, **options: Any) -> Any:
        """Run the module's forward."""
        return self.module(*inputs, **options)

    def backward(self, loss: Tensor, *, last: bool) -> None:
        """Add the gradient of `loss`; with one process there is nothing to do at the `last`
        micro-batch."""
        loss.backward()

    def step(self) -> StepOutcome:
        """Clip, update, clear the gradients, advance the schedule; a gradient that is not finite
        moves nothing."""
        assert self.optimizer is not None, f"the engine of {self.role} was prepared without one"
        trained = [item for item in self.module.parameters() if item.grad is not None]
        norm = nn.utils.get_total_norm([item.grad for item in trained if item.grad is not None])
        moved = math.isfinite(float(norm))
        if moved:
            if self.clip:
                nn.utils.clip_grads_with_norm_(trained, self.clip, norm)
            self.optimizer.step()
            if self.schedule is not None:
                self.schedule.step()
        self.optimizer.zero_grad(set_to_none=True)
        return StepOutcome(moved=moved, grad_norm=float(norm))

    def train(self) -> None:
        """Dropout and recomputation on."""
        self.module.train()

    def eval(self) -> None:
        """Dropout and recomputation off."""
        self.module.eval()


class PlainBackend:
    """All hooks without sharding, offload or ranks."""

    @hookimpl
    def setup_mesh(self, config: Config) -> Mesh:
        if config.model.dtype != "fp32":
            raise RLHFError(
                f"the plain backend does not support model.dtype {config.model.dtype}; "
                "set model.dtype to fp32 or choose another backend"
            )
        if os.environ.get("WORLD_SIZE", "1") != "1":
            raise RLHFError("the plain backend runs in one process; pass --nproc 1")
        seed(config)
        return Mesh()

    @hookimpl
    def configure_zero(
        self,
        config: Config,
        mesh: Mesh,
        model_shape: ModelShape,
        role: str,
        trained: bool,
        occupied: int,
    ) -> Plan:
        settings = {"clip": config.optim.clip}
        return Plan(precision="fp32", settings=settings, summary="plain torch, fp32, 1 rank")

    @hookimpl
    def estimate_memory(
        self, config: Config, plan: Plan, model_shape: ModelShape, mesh: Mesh, trained: bool
    ) -> Mapping[str, int]:
        weights, trainable = 4 * model_shape.parameters, 4 * model_shape.trainable
        states = {"gradients": trainable, "optimizer": 2 * trainable}
        return {"weights": weights, **(states if trained else {})}

    @hookimpl
    def model_context(self, plan: Plan, role: str, mesh: Mesh) -> AbstractContextManager[Any]:
        return nullcontext()

    @hookimpl
    def load_weights(
        self, module: nn.Module, weights: Mapping[str, Tensor] | None, plan: Plan, mesh: Mesh
    ) -> tuple[str, ...]:
        return tuple(module.load_state_dict(dict(weights or {}), strict=False).missing_keys)

    @hookimpl
    def build_optimizer(
        self, groups: Sequence[Mapping[str, Any]], config: Config, plan: Plan, model: nn.Module
    ) -> Optimizer:
        optim = config.optim
        if optim.name != "adamw":
            raise RLHFError(f"the plain backend has no {optim.name}; set optim.name to adamw")
        filled = [dict(group) for group in groups if group["params"]]
        return AdamW(filled, lr=optim.lr, betas=optim.betas, eps=optim.eps, weight_decay=0.0)

    @hookimpl
    def prepare(
        self,
        model: nn.Module,
        optimizer: Optimizer | None,
        schedule: LRScheduler | None,
        role: str,
        plan: Plan,
        mesh: Mesh,
    ) -> PlainEngine:
        if optimizer is None:
            model.requires_grad_(False).eval()
        clip = plan.settings["clip"]
        return PlainEngine(model, optimizer, schedule, role=role, clip=clip, device=mesh.device)

    @hookimpl
    def save_checkpoint(self, engine: PlainEngine) -> EngineState:
        return EngineState(fragments=list(_fragments(engine)))

    @hookimpl
    def load_checkpoint(self, engine: PlainEngine, saved: SavedState) -> bool:
        if engine.optimizer is not None:
            for name, parameter in engine.module.named_parameters():
                if kinds := {*saved.kinds(name)} - {"weight", "step"}:
                    state = engine.optimizer.state[parameter]
                    state["step"] = torch.zeros(())
                    state |= {kind: torch.zeros_like(parameter) for kind in kinds}
        for item in _fragments(engine):
            saved.read(item.name, item.kind, item.offset, item.values)
        return True

    @hookimpl
    def weights(
        self, engine: PlainEngine, buckets: Sequence[Sequence[str]]
    ) -> Iterator[Mapping[str, Tensor]]:
        state = engine.module.state_dict()
        return ({name: state[name] for name in names} for names in buckets)

    @hookimpl
    def mix_weights(self, engine: PlainEngine, source: PlainEngine, share: float) -> bool:
        pairs = zip(engine.module.parameters(), source.module.parameters(), strict=True)
        with torch.no_grad():
            for weight, source_weight in pairs:
                weight.lerp_(source_weight, share)
        return True

    @hookimpl
    def generation_context(self, engine: PlainEngine) -> AbstractContextManager[Any]:
        return _generation(engine)

    @hookimpl
    def close_mesh(self, mesh: Mesh) -> bool:
        return True

    @hookimpl
    def diagnose(self) -> Sequence[Finding]:
        return (Finding(subject="plain backend", here="one process, fp32"),)


@contextmanager
def _generation(engine: PlainEngine) -> Iterator[None]:
    was_training = engine.module.training
    engine.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        engine.module.train(was_training)


def _fragments(engine: PlainEngine) -> Iterator[Fragment]:
    states = {} if engine.optimizer is None else engine.optimizer.state
    parameters = dict(engine.module.named_parameters())
    kept = engine.module.state_dict().keys()
    buffers = {name: value for name, value in engine.module.named_buffers() if name in kept}
    for name, value in (parameters | buffers).items():
        for kind, values in ({"weight": value} | states.get(value, {})).items():
            yield Fragment(name=name, kind=kind, offset=0, values=values.detach().view(-1))


def seed(config: Config) -> None:
    """Seed every source of random numbers."""
    random.seed(config.train.seed)
    np.random.seed(config.train.seed % 2**32)
    torch.manual_seed(config.train.seed)
    torch.use_deterministic_algorithms(config.train.deterministic)
