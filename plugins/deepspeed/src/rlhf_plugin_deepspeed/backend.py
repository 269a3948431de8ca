"""The backend hooks of `rlhf.hookspecs`, answered with DeepSpeed."""

from rlhf_plugin_deepspeed.quiet import silenced  # isort: skip

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from attrs import evolve
from torch import Tensor, distributed, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from rlhf.engine import EngineState, Layout, Mesh, ModelShape, SavedState, StateKind
from rlhf.hookspecs import Finding, hookimpl
from rlhf.plugin import Config
from rlhf_plugin_deepspeed import checkpoint, memory, offload, zero
from rlhf_plugin_deepspeed import mesh as meshes
from rlhf_plugin_deepspeed import optimizer as optimizers
from rlhf_plugin_deepspeed.builds import watched_builds
from rlhf_plugin_deepspeed.capabilities import check_sums
from rlhf_plugin_deepspeed.diagnosis import diagnose
from rlhf_plugin_deepspeed.engine import InferenceEngine
from rlhf_plugin_deepspeed.frozen import plan_frozen
from rlhf_plugin_deepspeed.layouts import layouts
from rlhf_plugin_deepspeed.nvme import Drive, find_drive
from rlhf_plugin_deepspeed.patches.install import run_scope
from rlhf_plugin_deepspeed.plans import ZeroPlan
from rlhf_plugin_deepspeed.prepare import prepare_inference, prepare_training
from rlhf_plugin_deepspeed.tensor import check_divides, shape_of_part
from rlhf_plugin_deepspeed.versions import installed_version
from rlhf_plugin_deepspeed.weights import kept_whole, load, mix, sharded_creation, whole


class DeepSpeedBackend:
    """ZeRO 0 to 3 through DeepSpeed; tested on CUDA and on the CPU."""

    def __init__(self) -> None:
        self._started_group = False
        self._drive: Drive | None = None

    @hookimpl
    def setup_mesh(self, config: Config) -> Mesh:
        run_scope.enter_context(silenced())
        run_scope.enter_context(watched_builds())
        self._started_group = not distributed.is_initialized()
        timeout = timedelta(minutes=config.backend_section.timeout)
        mesh = meshes.join(config, timeout=timeout)
        meshes.seed(config.train.seed, deterministic=config.train.deterministic)
        folder = config.backend_section.nvme_path
        self._drive = None if folder is None else find_drive(Path(folder), mesh)
        return mesh

    @hookimpl
    def axis_sizes(self, config: Config, ranks: int) -> Mapping[str, int]:
        return meshes.axis_sizes(config, ranks)

    @hookimpl
    def configure_zero(
        self,
        config: Config,
        mesh: Mesh,
        model_shape: ModelShape,
        role: str,
        trained: bool,
        occupied: int,
    ) -> ZeroPlan:
        part = shape_of_part(model_shape, mesh.tensor.size)
        if trained:
            check_divides(model_shape, mesh, path=config.model.path)
            plan = zero.plan(config, mesh, part, occupied=occupied)
        else:
            plan = plan_frozen(config, mesh, part, occupied=occupied)
        if self._drive is None:
            return plan
        parts = memory.estimate(config, plan, part, world=mesh.shards.size, trained=trained)
        cost = self._drive.check(role, parts["nvme"], first=not occupied)
        return evolve(plan, summary=plan.summary + cost)

    @hookimpl
    def estimate_memory(
        self, config: Config, plan: ZeroPlan, model_shape: ModelShape, mesh: Mesh, trained: bool
    ) -> Mapping[str, int]:
        part = shape_of_part(model_shape, plan.tensor)
        return memory.estimate(
            config, plan, part, world=mesh.shards.size, trained=trained, device=mesh.device.type
        )

    @hookimpl
    def layouts(self, config: Config, mesh: Mesh, model_shape: ModelShape) -> Sequence[Layout]:
        check_divides(model_shape, mesh, path=config.model.path)
        return layouts(config, mesh, shape_of_part(model_shape, mesh.tensor.size))

    @hookimpl
    def model_context(self, plan: ZeroPlan, role: str, mesh: Mesh) -> AbstractContextManager[Any]:
        check_sums(plan.settings, stage=plan.stage, version=installed_version())
        return sharded_creation(plan, mesh)

    @hookimpl
    def load_weights(
        self, module: nn.Module, weights: Mapping[str, Tensor] | None, plan: ZeroPlan, mesh: Mesh
    ) -> tuple[str, ...]:
        return load(module, weights, mesh)

    @hookimpl
    def build_optimizer(
        self, groups: Sequence[Mapping[str, Any]], config: Config, plan: ZeroPlan, model: nn.Module
    ) -> Optimizer:
        return optimizers.build(groups, model, config)

    @hookimpl
    def prepare(
        self,
        model: nn.Module,
        optimizer: Optimizer | None,
        schedule: LRScheduler | None,
        role: str,
        plan: ZeroPlan,
        mesh: Mesh,
    ) -> InferenceEngine:
        if optimizer is None:
            return prepare_inference(model, role=role, plan=plan, mesh=mesh)
        return prepare_training(model, optimizer, schedule, role=role, plan=plan, mesh=mesh)

    @hookimpl
    def save_checkpoint(self, engine: InferenceEngine) -> EngineState:
        return checkpoint.engine_state(engine)

    @hookimpl
    def load_checkpoint(self, engine: InferenceEngine, saved: SavedState) -> bool:
        checkpoint.restore(engine, saved)
        return True

    @hookimpl
    def weights(
        self, engine: InferenceEngine, buckets: Sequence[Sequence[str]]
    ) -> Iterator[Mapping[str, Tensor]]:
        return whole(engine, buckets)

    @hookimpl
    def mix_weights(
        self,
        engine: InferenceEngine,
        source: InferenceEngine,
        share: float,
        names: Mapping[str, str],
    ) -> bool:
        mix(engine, source, share=share, names=names)
        return True

    @hookimpl
    @contextmanager
    def generation_context(self, engine: InferenceEngine) -> Iterator[None]:
        """Switch to evaluation mode without gradient and back; weights are whole if they fit."""
        was_training = engine.module.training
        engine.eval()
        try:
            with torch.no_grad(), kept_whole(engine):
                yield
        finally:
            engine.module.train(was_training)

    @hookimpl
    def offload_states(self, engine: InferenceEngine, kinds: Collection[StateKind]) -> int:
        return offload.offload(engine, kinds)

    @hookimpl
    def reload_states(self, engine: InferenceEngine, kinds: Collection[StateKind]) -> bool:
        offload.reload(engine, kinds)
        return True

    @hookimpl
    def close_mesh(self, mesh: Mesh) -> bool:
        meshes.close_groups(mesh)
        run_scope.close()
        # A group that was running before belongs to its owner.
        if self._started_group:
            distributed.destroy_process_group()
        return True

    @hookimpl
    def diagnose(self) -> Sequence[Finding]:
        with silenced():
            return diagnose()
