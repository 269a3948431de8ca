"""What core knows of parameters that a backend has divided among the ranks."""

from collections.abc import Sequence
from itertools import chain
from typing import Protocol

import torch
from torch import Tensor


class Sharding(Protocol):
    """How a backend shards parameters. At ZeRO-3 a parameter is empty outside of a forward."""

    def whole_shape(self, parameter: Tensor) -> torch.Size | None:
        """Return the shape of the whole parameter; None if this backend has not sharded it."""

    def shards(self, parameter: Tensor) -> Sequence[Tensor]:
        """Return the tensors that hold this rank's parts of a sharded parameter."""


_shardings: list[Sharding] = []


def register_sharding(sharding: Sharding) -> None:
    """Make a backend's way of sharding known for the rest of the process.

    Call it before the first parameter is sharded; registering an equal object again has no effect.
    """
    if sharding not in _shardings:
        _shardings.append(sharding)


def whole_shape(parameter: Tensor) -> torch.Size:
    """Return the shape of a parameter as it was created, whether or not it is sharded."""
    shapes = (sharding.whole_shape(parameter) for sharding in _shardings)
    return next((shape for shape in shapes if shape is not None), parameter.shape)


def is_sharded(parameter: Tensor) -> bool:
    """Return whether a backend has divided the parameter among the ranks."""
    return any(sharding.whole_shape(parameter) is not None for sharding in _shardings)


def held(parameter: Tensor) -> list[Tensor]:
    """Return the tensors of this rank that have values of a parameter: itself and its shards."""
    return [parameter, *chain(*(sharding.shards(parameter) for sharding in _shardings))]


def free(parameter: Tensor) -> None:
    """Release the memory of a parameter that is not used again, and that of its shards."""
    for part in held(parameter):
        part.data = part.data.new_empty(0)
