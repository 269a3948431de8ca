"""Weights under ZeRO-3: created in shards, loaded and gathered one parameter at a time."""

import copy
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import deepspeed
import torch
from attrs import frozen
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus
from deepspeed.utils import groups
from torch import Tensor, distributed, nn

from rlhf.engine import Mesh, register_sharding
from rlhf.errors import RLHFError
from rlhf_plugin_deepspeed.engine import InferenceEngine
from rlhf_plugin_deepspeed.nvme import state_files
from rlhf_plugin_deepspeed.patches.linear import replace_linear
from rlhf_plugin_deepspeed.plans import ZeroPlan
from rlhf_plugin_deepspeed.tensor import part_of

GENERATION = -1
"""Stands for a module among those that use a weight, whose numbers begin at 0."""
SHARE = 0.5
"""Share of the free memory for whole weights in generation, beside keys and values."""


@frozen
class BackendSharding:
    """What core asks (`rlhf.engine.Sharding`) of parameters under ZeRO-3 or a tensor axis."""

    def whole_shape(self, parameter: Tensor) -> torch.Size | None:
        """Return the shape of the whole parameter; None if this rank has all of it."""
        part = part_of(parameter)
        return getattr(parameter, "ds_shape", None) if part is None else part.shape

    def shards(self, parameter: Tensor) -> Sequence[Tensor]:
        """Return ZeRO-3's shard and that of a second copy; a divided parameter is its own part."""
        held = (getattr(parameter, f"ds_{name}", None) for name in ("tensor", "secondary_tensor"))
        return [shard for shard in held if shard is not None]


@contextmanager
def sharded_creation(plan: ZeroPlan, mesh: Mesh, module: nn.Module | None = None) -> Iterator[None]:
    """Shard new parameters at stage 3, and those of `module` at once."""
    if plan.stage < 3:
        yield
        return
    register_sharding(BackendSharding())
    replace_linear(plan.patches)
    zero = plan.settings["zero_optimization"]
    # Init reads the dtype from the settings: its argument makes fp32 bf16 on devices without fp16.
    second = groups._ZERO_PARAM_INTRA_PARALLEL_GROUP if "zero_hpz_partition_size" in zero else None
    with (
        state_files(plan),
        deepspeed.zero.Init(
            module=module,
            data_parallel_group=mesh.shards.group,
            config_dict_or_path=copy.deepcopy(plan.settings),
            zero_param_parallel_group=second,
        ),
    ):
        yield


def load(module: nn.Module, weights: Mapping[str, Tensor] | None, mesh: Mesh) -> tuple[str, ...]:
    """Fill a sharded `module` from rank 0's `weights`; returns the names that are missing there.
    Raises RLHFError, the same on every rank, for a weight of another shape. Collective."""
    names = _names(module)
    sources = mesh.on_rank_zero(lambda: _sources(names, weights))
    for parameter, source in zip(names, sources, strict=True):
        for shard in BackendSharding().shards(parameter):
            # DeepSpeed creates all parameters in one dtype; some are in fp32.
            shard.data = shard.data.to(parameter.dtype)
        if source is None:
            continue
        with deepspeed.zero.GatheredParameters([parameter], modifier_rank=0), torch.no_grad():
            if weights is not None and mesh.rank == 0:
                parameter.copy_(weights[source])
    # The next gathering reads the last shard on another stream.
    get_accelerator().synchronize()
    _load_buffers(module, weights, mesh)
    return tuple(
        aliases[0] for aliases, source in zip(names.values(), sources, strict=True) if not source
    )


def whole(engine: InferenceEngine, buckets: Sequence[Sequence[str]]) -> Iterator[dict[str, Tensor]]:
    """Yield the whole weights and buffers of each bucket of names. Collective."""
    values = {**dict(engine.module.named_parameters()), **dict(engine.module.named_buffers())}
    for names in buckets:
        bucket = {name: values[name] for name in names}
        with deepspeed.zero.GatheredParameters([*bucket.values()]):
            yield {name: _undivided(value) for name, value in bucket.items()}


@contextmanager
def kept_whole(engine: InferenceEngine) -> Iterator[None]:
    """Gather all sharded weights once and keep them while the context lasts, if every rank has room
    for them; otherwise each forward gathers them again. Collective."""
    sharded = [item for item in engine.module.parameters() if hasattr(item, "ds_id")]
    # Others are kept anyway, and DeepSpeed counts them.
    missing = [item for item in sharded if item.ds_status == ZeroParamStatus.NOT_AVAILABLE]
    if not missing or not _has_room(missing, engine.mesh):
        yield
        return
    with deepspeed.zero.GatheredParameters(missing):
        for item in sharded:
            # DeepSpeed releases a weight after a module's forward unless another one is using it.
            item.ds_active_sub_modules.add(GENERATION)
        try:
            yield
        finally:
            for item in sharded:
                item.ds_active_sub_modules.discard(GENERATION)


def _has_room(parameters: list[Any], mesh: Mesh) -> bool:
    """Return whether every rank has room for the whole parameters. Collective."""
    size = sum(item.ds_numel * item.element_size() for item in parameters)
    room = mesh.memory - get_accelerator().memory_allocated()
    lacks = torch.tensor(float(size > SHARE * room), device=mesh.device)
    return not mesh.max(lacks).item()


def mix(
    engine: InferenceEngine, source: InferenceEngine, *, share: float, names: Mapping[str, str]
) -> None:
    """Move each weight in `names` of `engine` to `share` of that of `source`, in fp32 and back.
    Collective."""
    first = engine.mesh.rank == 0
    for name, other_name in names.items():
        parameter = engine.module.get_parameter(name)
        other = source.module.get_parameter(other_name)
        sharded = hasattr(parameter, "ds_id")
        with (
            torch.no_grad(),
            deepspeed.zero.GatheredParameters([other], enabled=hasattr(other, "ds_id")),
            deepspeed.zero.GatheredParameters([parameter], modifier_rank=0, enabled=sharded),
        ):
            # Rank 0's value of a sharded one goes to all ranks; each rank moves a whole one itself.
            if first or not sharded:
                parameter.copy_(torch.lerp(parameter.float(), other.float(), share))
    # As in `load`.
    get_accelerator().synchronize()


def _undivided(parameter: Tensor) -> Tensor:
    part = part_of(parameter)
    return parameter.detach() if part is None else part.whole(parameter.detach())


def _names(module: nn.Module) -> dict[nn.Parameter, list[str]]:
    """Return every parameter with its names: a tied one has several."""
    names: dict[nn.Parameter, list[str]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        names.setdefault(parameter, []).append(name)
    return names


def _sources(
    names: Mapping[nn.Parameter, list[str]], weights: Mapping[str, Tensor] | None
) -> list[str | None]:
    """Return the key of `weights` that fills each parameter. Raises RLHFError for another shape."""
    assert weights is not None, "rank 0 loads the weights"
    sources: list[str | None] = []
    for parameter, aliases in names.items():
        source = next((name for name in aliases if name in weights), None)
        sources.append(source)
        shape = tuple(getattr(parameter, "ds_shape", parameter.shape))
        if source is not None and tuple(weights[source].shape) != shape:
            raise RLHFError(
                f"the weight {source} has the shape {list(weights[source].shape)} but the model "
                f"expects {list(shape)}; the weights in model.path do not belong to its config.json"
            )
    return sources


def buffers(module: nn.Module) -> list[tuple[str, Tensor]]:
    """Return the buffers of the state dict; others are computed, not loaded."""
    kept = set(module.state_dict())
    return [(name, buffer) for name, buffer in module.named_buffers() if name in kept]


def _load_buffers(module: nn.Module, weights: Mapping[str, Tensor] | None, mesh: Mesh) -> None:
    for name, buffer in buffers(module):
        if weights is not None and mesh.rank == 0 and name in weights:
            buffer.copy_(weights[name])
        if mesh.world > 1:
            value = buffer.to(mesh.device)
            distributed.broadcast(value, src=0)
            buffer.copy_(value)
