"""What an engine of torch holds: whole parameters, and DTensors that are divided along their first
dimension."""

from collections.abc import Iterator, Sequence

import torch
from attrs import frozen
from torch import Tensor
from torch.distributed.tensor import DTensor

from rlhf.engine import Fragment
from rlhf_backend_torch.engine import TorchEngine


@frozen
class DTensorSharding:
    """What core asks (`rlhf.engine.Sharding`) of parameters that are DTensors."""

    def whole_shape(self, parameter: Tensor) -> torch.Size | None:
        """Return the shape of the whole parameter; None for a plain tensor."""
        return parameter.shape if isinstance(parameter, DTensor) else None

    def shards(self, parameter: Tensor) -> Sequence[Tensor]:
        """Return this rank's part of a DTensor."""
        return [parameter.to_local()] if isinstance(parameter, DTensor) else []


def fragments(engine: TorchEngine) -> Iterator[Fragment]:
    """Yield this rank's part of each parameter, of the buffers and of the optimizer's states."""
    states = {} if engine.optimizer is None else engine.optimizer.state
    parameters = dict(engine.module.named_parameters())
    kept = engine.module.state_dict().keys()
    buffers = {name: value for name, value in engine.module.named_buffers() if name in kept}
    for name, value in (parameters | buffers).items():
        for kind, values in ({"weight": value} | states.get(value, {})).items():
            local = values.to_local() if isinstance(values, DTensor) else values
            yield Fragment(
                name=name,
                kind=kind,
                offset=_offset(values),
                values=local.detach().view(-1),
                replicated=not isinstance(values, DTensor) and engine.mesh.world > 1,
            )


def whole(value: Tensor) -> Tensor:
    """Return a whole weight. Collective if it is divided."""
    return value.full_tensor() if isinstance(value, DTensor) else value


def _offset(values: Tensor) -> int:
    """Return how many elements of a DTensor are on the ranks before this one: torch divides the
    first dimension as `Tensor.chunk` does."""
    if not isinstance(values, DTensor):
        return 0
    rows = -(-len(values) // values.device_mesh.size())
    before = min(rows * values.device_mesh.get_local_rank(), len(values))
    return before * values.shape[1:].numel()
