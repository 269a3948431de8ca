"""Masks and batches for tests of kernels, shards of weights, and kernels compiled for a GPU."""

import os
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
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


def compiled_for_a_gpu(name: str, *words: object, cache: Path) -> list[int]:
    """Return the shared memory of each kernel that the script `compile_NAME.py WORDS` compiles for
    a GPU that need not be here."""
    environment = dict(os.environ) | {"TRITON_CACHE_DIR": str(cache)}
    environment.pop("TRITON_INTERPRET", None)  # The interpreter accepts more than the compiler.
    script = Path(__file__).with_name(f"compile_{name}.py")
    command = [sys.executable, str(script), *map(str, words)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    return [int(word) for word in done.stdout.split()]
