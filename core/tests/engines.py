"""Engines and hooks without a backend, for tests of models."""

from collections.abc import Iterable
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from rlhf.data.batch import PackedBatch
from rlhf.engine import Mesh, Plan
from rlhf.model.packed import PackedModel


class BareEngine:
    """An engine that calls the module as it is."""

    sharded, role, device = False, "policy", torch.device("cpu")

    def __init__(self, module: PackedModel, precision: str = "fp32") -> None:
        self.module, self.precision = module, precision

    def __call__(self, batch: PackedBatch, readout: Any) -> Any:
        return self.module(batch, readout)

    def backward(self, loss: Tensor, *, last: bool) -> None:
        loss.backward()

    def train(self) -> None:
        self.module.train()

    def eval(self) -> None:
        self.module.eval()


class WholeWeights:
    """Hooks of stage 3 without shards: modules are created whole and filled from a state dict."""

    def model_context(self, plan: Plan, role: str, mesh: Mesh) -> Any:
        return nullcontext()

    def load_weights(self, module: Any, weights: Any, plan: Plan, mesh: Mesh) -> tuple[str, ...]:
        missing, unexpected = module.load_state_dict(weights, strict=False)
        assert not unexpected
        return tuple(missing)


class Shards:
    """A backend that has sharded these parameters."""

    def __init__(self, parameters: Iterable[Tensor]) -> None:
        self.shapes = {parameter: parameter.shape for parameter in parameters}
        self.parts = {parameter: torch.ones(3) for parameter in self.shapes}

    def whole_shape(self, parameter: Tensor) -> torch.Size | None:
        return self.shapes.get(parameter)

    def shards(self, parameter: Tensor) -> list[Tensor]:
        return [self.parts[parameter]] if parameter in self.parts else []
