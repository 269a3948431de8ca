"""Python's garbage collector during training: it skips what existed before the first step."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def frozen_heap(device: torch.device) -> Iterator[None]:
    """Exclude from collections, in this block, the objects that exist before it."""
    freeze_heap(device)
    try:
        yield
    finally:
        gc.unfreeze()


def freeze_heap(device: torch.device) -> None:
    """Exclude from collections the objects that exist now: a full collection visits everything that
    the libraries hold, which stops some step for half a second."""
    if device.type != "cpu":
        # Dead cycles would keep their tensors on the accelerator.
        gc.collect()
    gc.freeze()
