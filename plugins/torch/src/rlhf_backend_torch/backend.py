"""The hooks of a backend in plain torch.

As it is, every rank has the whole model, and gradients are added up over the ranks. A subclass
changes what is its own. One that shards overrides `shard` and leaves parameters that are DTensors,
divided along their first dimension, as `torch.distributed.fsdp.fully_shard` makes them: the engine,
checkpoints and exports work with these too.
"""

import os
import random
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import timedelta
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor, distributed, nn
from torch.optim import AdamW, Optimizer
from torch.optim.lr_scheduler import LRScheduler

from rlhf.engine import EngineState, Mesh, ModelShape, Plan, SavedState, register_sharding
from rlhf.errors import RLHFError, counted
from rlhf.hookspecs import Finding, hookimpl
from rlhf.plugin import Config
from rlhf_backend_torch.engine import TorchEngine
from rlhf_backend_torch.state import DTensorSharding, fragments, whole

TIMEOUT = timedelta(minutes=30)
"""How long a rank waits for the others in a collective."""


class TorchBackend:
    """All hooks on torch.distributed. A subclass marks what it overrides with `@hookimpl` again."""

    name: ClassVar[str] = "torch"
    """What the run's lines call the backend."""
    precisions: ClassVar[Sequence[str]] = ("fp32",)
    """The values of `model.dtype` that it supports: the model is trained in that dtype."""
    sharded: ClassVar[bool] = False
    """Whether `shard` divides the weights."""

    def __init__(self) -> None:
        self._started_group = False

    @hookimpl
    def setup_mesh(self, config: Config) -> Mesh:
        self.check_precision(config)
        local = int(os.environ.get("LOCAL_RANK", "0"))
        accelerator = torch.accelerator.current_accelerator(check_available=True)
        device = torch.device("cpu")
        if accelerator is not None:
            device = torch.device(accelerator.type, local)
            torch.accelerator.set_device_index(local)
        launched = "WORLD_SIZE" in os.environ
        self._started_group = not distributed.is_initialized() and (launched or self.sharded)
        if self._started_group:
            # A store in memory needs no port, so runs of one process never collide.
            store = None if launched else distributed.HashStore()
            rank, world = (-1, -1) if launched else (0, 1)
            distributed.init_process_group(
                distributed.get_default_backend_for_device(device),
                timeout=TIMEOUT, store=store, rank=rank, world_size=world,
            )  # fmt: skip
        seed(config)
        rank, world = 0, 1
        if distributed.is_initialized():
            rank, world = distributed.get_rank(), distributed.get_world_size()
        memory = _memory(device)
        return Mesh(rank=rank, world=world, local_rank=local, device=device, memory=memory)

    def check_precision(self, config: Config) -> None:
        """Raise RLHFError for a `model.dtype` that the backend does not support."""
        if config.model.dtype not in self.precisions:
            raise RLHFError(
                f"the {self.name} backend does not support model.dtype {config.model.dtype}; "
                f"set model.dtype to {' or '.join(self.precisions)} or choose another backend"
            )

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
        return Plan(
            sharded=self.sharded,
            precision=config.model.dtype,
            settings={"clip": config.optim.clip},
            summary=f"{self.name}, {config.model.dtype}, {counted(mesh.world, 'rank')}",
        )

    @hookimpl
    def estimate_memory(
        self, config: Config, plan: Plan, model_shape: ModelShape, mesh: Mesh, trained: bool
    ) -> Mapping[str, int]:
        size, ranks = (4 if plan.precision == "fp32" else 2), mesh.shards.size
        ranks = ranks if plan.sharded else 1
        gathered = 2 * size * model_shape.largest_layer if plan.sharded else 0
        weights = size * model_shape.parameters // ranks + gathered
        trainable = size * model_shape.trainable // ranks
        states = {"gradients": trainable, "optimizer": 2 * trainable}
        return {"weights": weights, **(states if trained else {})}

    @hookimpl
    def model_context(self, plan: Plan, role: str, mesh: Mesh) -> AbstractContextManager[Any]:
        # The model is created on the host, and `shard` divides it.
        return nullcontext()

    @hookimpl
    def load_weights(
        self, module: nn.Module, weights: Mapping[str, Tensor] | None, plan: Plan, mesh: Mesh
    ) -> tuple[str, ...]:
        missing: tuple[str, ...] = ()
        if weights is not None:
            missing = tuple(module.load_state_dict(dict(weights), strict=False).missing_keys)
        for value in module.state_dict().values():
            if mesh.world > 1:
                sent = value.to(mesh.device)
                distributed.broadcast(sent, src=0)
                value.copy_(sent)
        return mesh.on_rank_zero(lambda: missing)

    @hookimpl
    def build_optimizer(
        self, groups: Sequence[Mapping[str, Any]], config: Config, plan: Plan, model: nn.Module
    ) -> Optimizer:
        optim = config.optim
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
    ) -> TorchEngine:
        register_sharding(DTensorSharding())
        if optimizer is None:
            model.requires_grad_(False).eval()
        return TorchEngine(model, optimizer, schedule, role=role, plan=plan, mesh=mesh)

    @hookimpl
    def save_checkpoint(self, engine: TorchEngine) -> EngineState:
        return EngineState(fragments=list(fragments(engine)))

    @hookimpl
    def load_checkpoint(self, engine: TorchEngine, saved: SavedState) -> bool:
        if engine.optimizer is not None:
            for name, parameter in engine.module.named_parameters():
                if kinds := {*saved.kinds(name)} - {"weight", "step"}:
                    state = engine.optimizer.state[parameter]
                    state["step"] = torch.zeros(())
                    state |= {kind: torch.zeros_like(parameter) for kind in kinds}
        for item in fragments(engine):
            saved.read(item.name, item.kind, item.offset, item.values)
        return True

    @hookimpl
    def weights(
        self, engine: TorchEngine, buckets: Sequence[Sequence[str]]
    ) -> Iterator[Mapping[str, Tensor]]:
        state = engine.module.state_dict()
        for names in buckets:
            yield {name: whole(state[name]) for name in names}

    @hookimpl
    def mix_weights(
        self, engine: TorchEngine, source: TorchEngine, share: float, names: Mapping[str, str]
    ) -> bool:
        with torch.no_grad():
            for name, other in names.items():
                weight = engine.module.get_parameter(name)
                weight.lerp_(source.module.get_parameter(other).to(weight.dtype), share)
        return True

    @hookimpl
    @contextmanager
    def generation_context(self, engine: TorchEngine) -> Iterator[None]:
        was_training = engine.module.training
        engine.eval()
        try:
            with torch.no_grad():
                yield
        finally:
            engine.module.train(was_training)

    @hookimpl
    def close_mesh(self, mesh: Mesh) -> bool:
        # A group that was running before belongs to its owner.
        if self._started_group:
            distributed.destroy_process_group()
        return True

    @hookimpl
    def diagnose(self) -> Sequence[Finding]:
        return (Finding(subject=f"{self.name} backend", here=f"torch {torch.__version__}"),)


def _memory(device: torch.device) -> int:
    """Return the bytes of an accelerator; 0, unknown, on a CPU."""
    if device.type == "cpu":
        return 0
    total: int = torch.get_device_module(device).mem_get_info(device)[1]
    return total


def seed(config: Config) -> None:
    """Seed every source of random numbers."""
    random.seed(config.train.seed)
    np.random.seed(config.train.seed % 2**32)
    torch.manual_seed(config.train.seed)
    torch.use_deterministic_algorithms(config.train.deterministic)
