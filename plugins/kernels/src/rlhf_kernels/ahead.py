"""Kernels are made ready in threads while weights are read: those of tree attention are compiled,
or loaded from their cache, and the library of matrix products is loaded."""

from collections.abc import Iterable
from contextlib import suppress
from threading import Thread

import torch
from torch import Tensor

from rlhf.kernels import BLOCK
from rlhf_kernels.tree import Heads, attend, differentiate


class Ahead:
    """The threads that compile for the first "forward" and the first "backward"."""

    def __init__(self) -> None:
        self._threads: dict[str, Thread] = {}

    def compile(self, kinds: Iterable[Heads], device: torch.device) -> None:
        """Begin to compile the kernels for `kinds` of attention."""
        for name in ("forward", "backward"):
            self._threads[name] = Thread(target=_compile, args=(name, tuple(kinds), device))
            self._threads[name].start()

    def wait(self, name: str) -> None:
        """Wait for what is being compiled for "forward" or "backward"."""
        thread = self._threads.pop(name, None)
        if thread is not None:
            thread.join()

    def wait_in_backward(self, output: Tensor) -> None:
        """Wait for the kernels of backward when the gradient of `output` is known."""
        if "backward" in self._threads and output.requires_grad:
            output.register_hook(lambda gradient: self.wait("backward"))


def _compile(name: str, kinds: Iterable[Heads], device: torch.device) -> None:
    # Whatever fails here is reported where the kernel runs.
    with suppress(Exception), torch.get_device_module(device).device(device):
        if name == "forward":
            load_matmul({torch.float32} | {kind.dtype for kind in kinds}, device)
        for kind in kinds:
            compile_kind(name, kind)


def load_matmul(dtypes: Iterable[torch.dtype], device: torch.device) -> None:
    """Have the library of matrix products load what its first products of these dtypes need."""
    with suppress(Exception):
        for dtype in dtypes:
            square = torch.zeros(16, 16, dtype=dtype, device=device)
            torch.mm(square, square)


def compile_kind(name: str, kind: Heads) -> None:
    """Compile what "forward" or "backward" runs, for this process's device."""
    query, key, value, output, lse, bounds = _inputs(kind)
    if name == "forward":
        attend(query, key, value, bounds, kind.scale, kind.softcap)
    else:
        differentiate(output, lse, query, key, value, bounds, output, lse, kind.scale, kind.softcap)


def _inputs(kind: Heads) -> list[Tensor]:
    """Return query, key, value, output, log-sum-exp and bounds without values."""
    shapes = (
        (kind.heads, kind.width), (kind.key_heads, kind.width), (kind.key_heads, kind.of_value),
        (kind.heads, kind.of_value),
    )  # fmt: skip
    # In memory the heads of a token are adjacent, as rotary embeddings leave them.
    row = [
        torch.empty(1, BLOCK, heads, width, dtype=kind.dtype, device="meta").transpose(1, 2)
        for heads, width in shapes
    ]
    # Explicit, since transformers changes the default dtype while it builds a model.
    lse = torch.empty(1, kind.heads, BLOCK, dtype=torch.float32, device="meta")
    return [*row, lse, torch.empty(5, BLOCK, dtype=torch.int32, device="meta")]
