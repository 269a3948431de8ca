"""Masks and batches for tests of kernels, and shards of weights."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from transformers.masking_utils import (
    chunked_causal_mask_function,
    sliding_window_causal_mask_function,
)

from rlhf.data.batch import PackedBatch
from rlhf.data.packing import blank_batch
from rlhf.kernels import TreeMask

KINDS: dict[str, Any] = {
    "full": None,
    "sliding": sliding_window_causal_mask_function(6),
    "wide": sliding_window_causal_mask_function(150),
    "chunked": chunked_causal_mask_function(8, torch.zeros(1, dtype=torch.long)),
}


class Shards:
    """A backend that has sharded these parameters."""

    def __init__(self, parameters: Iterable[Tensor]) -> None:
        self.shapes = {parameter: parameter.shape for parameter in parameters}
        self.parts = {parameter: torch.ones(3) for parameter in self.shapes}

    def whole_shape(self, parameter: Tensor) -> torch.Size | None:
        return self.shapes.get(parameter)

    def shards(self, parameter: Tensor) -> list[Tensor]:
        return [self.parts[parameter]] if parameter in self.parts else []


def batch_of(spans: Any, multiple: int = 128) -> PackedBatch:
    total = sum(prompt + sum(answers) for prompt, answers in spans) or 1
    total = -(-total // multiple) * multiple
    generator = torch.Generator().manual_seed(0)
    return blank_batch(torch.randint(0, 50, (total,), generator=generator), spans)


def whole(mask: TreeMask) -> Tensor:
    """Which tokens see which [T, T]."""
    row = torch.arange(len(mask.tree.owner), device=mask.tree.owner.device)
    return mask.visible(row[:, None], row[None, :])
