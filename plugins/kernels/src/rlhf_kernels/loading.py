"""Weights on their way to an accelerator, faster than transformers copies them."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from inspect import signature
from typing import Any

import torch
from torch import Tensor
from transformers import core_model_loading

PIECE = 2**24
"""Bytes per copy through pinned memory. torch reuses a buffer once its copy has finished."""
IN_FLIGHT = 4
"""Copies that a thread starts before it waits for the device, which limits its pinned memory to 64
MiB."""


def through_pinned_memory(
    values: Tensor, device: torch.device, dtype: torch.dtype | None = None
) -> Tensor:
    """Copy a tensor from pageable memory to an accelerator, optionally converting it to `dtype`."""
    copy = torch.empty(values.shape, dtype=dtype or values.dtype, device=device)
    wait = partial(torch.get_device_module(device).synchronize, device)
    length = PIECE // max(values.element_size(), copy.element_size())
    parts = copy.view(-1).split(length), values.detach().reshape(-1).split(length)
    for number, (target, piece) in enumerate(zip(*parts, strict=True), 1):
        # As `Tensor.to` does, the host converts. A copy that also converts would not be pinned.
        target.copy_(piece.to(copy.dtype).pin_memory(), non_blocking=True)
        if number % IN_FLIGHT == 0:
            wait()
    wait()
    return copy


@contextmanager
def pinned_copies() -> Iterator[None]:
    """Have transformers copy weights to an accelerator through pinned memory, which is faster. A
    version without this function, or whose function takes other arguments, is left unchanged."""
    name = "_materialize_copy"
    own: Any = getattr(core_model_loading, name, None)
    if own is None or [*signature(own).parameters] != ["tensor", "device", "dtype"]:
        yield
        return

    def copy(tensor: Any, device: Any = None, dtype: torch.dtype | None = None) -> Tensor:
        place = torch.device("cpu" if device is None else device)
        if place.type in ("cpu", "meta", "mps"):  # Apple's devices share the host's memory.
            return own(tensor, device, dtype)
        # Indexing reads a tensor from its file.
        return through_pinned_memory(tensor[...], place, dtype)

    setattr(core_model_loading, name, copy)
    try:
        yield
    finally:
        setattr(core_model_loading, name, own)
