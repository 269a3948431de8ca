"""Weights, gradients and the optimizer's states in shards by torch's `fully_shard`."""

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard

from rlhf.engine import Mesh, Plan
from rlhf.hookspecs import hookimpl
from rlhf_backend_torch import TorchBackend, TorchEngine


class FullyShardBackend(TorchBackend):
    """Each layer is gathered for its forward and its backward, and the rest with the model."""

    name = "fully_shard"
    sharded = True

    @hookimpl
    def shard(self, model: nn.Module, plan: Plan, mesh: Mesh) -> bool:
        ranks = init_device_mesh(mesh.device.type, (mesh.world,))
        lists = (part for part in model.modules() if isinstance(part, nn.ModuleList))
        for part in (*(layer for layers in lists for layer in layers), model):
            # The root would stay whole after a forward without backward, and could not be saved.
            fully_shard(part, mesh=ranks, reshard_after_forward=True)
            assert isinstance(part, FSDPModule)
            # Core's losses are already divided: gradients are sums over the ranks.
            part.set_gradient_divide_factor(1.0)
            part.set_force_sum_reduction_for_comms(True)
        return True

    @hookimpl
    @contextmanager
    def generation_context(self, engine: TorchEngine) -> Iterator[None]:
        # Generation does not call the wrapper, which would gather embedding and head.
        with super().generation_context(engine):
            engine.module.unshard()
            try:
                yield
            finally:
                engine.module.reshard()
