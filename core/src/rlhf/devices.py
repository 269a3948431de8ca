"""Values between the host and its device, and what a kind of device can run."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor


class Deferred:
    """A copy of `values` [K] to the host that runs while the device continues.

    Reading a number from a device otherwise stops the host until all earlier work is done.
    """

    def __init__(self, values: Tensor) -> None:
        self._event = None
        if values.device.type == "cpu":
            self._host = values.detach().clone()
            return
        self._host = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
        self._host.copy_(values.detach(), non_blocking=True)
        self._event = torch.get_device_module(values.device).Event()
        self._event.record()

    def read(self) -> list[float]:
        """Return the values as floats; wait for the copy if it has not ended."""
        if self._event is not None:
            self._event.synchronize()
        return self._host.tolist()


def on_device(values: Tensor | Sequence[Any], device: torch.device | str) -> Tensor:
    """Return a tensor, or numbers or rows of them, on `device`, without waiting for the device as
    `torch.tensor(..., device=...)` and copies of pageable memory do."""
    host = values if isinstance(values, Tensor) else torch.tensor(values)
    if torch.device(device).type not in ("cpu", "meta", host.device.type):
        host = host.pin_memory()
    return host.to(device, non_blocking=True)


_rehearsed = ContextVar("rehearsed", default="")
"""The kind of device that the meta device represents; empty for this machine's. It is a context, as
torch's autocast is, because readouts and layers get only tensors, and torch has one meta device."""


@contextmanager
def rehearsing_on(kind: str) -> Iterator[None]:
    """Let the meta device represent a kind of device that this machine may not have."""
    before = _rehearsed.set(kind)
    try:
        yield
    finally:
        _rehearsed.reset(before)


def fused_on(kind: str) -> bool:
    """Return whether a kind of device ("cuda", "cpu") runs kernels written in Triton. The meta
    device, on which a run is rehearsed, represents that of `rehearsing_on`, or else this
    machine's accelerator."""
    if kind == "meta":
        kind = _rehearsed.get() or ("cuda" if torch.cuda.is_available() else "cpu")
    return kind == "cuda" and has_triton()


@cache
def has_triton() -> bool:
    """Return whether Triton is installed."""
    return find_spec("triton") is not None
