"""Numbers on their way between host and device, for which nobody waits."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


class Deferred:
    """A copy of `values` [K] that has been started; `read` waits only for what is not there yet."""

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
        """The values as floats."""
        if self._event is not None:
            self._event.synchronize()
        return self._host.tolist()


def on_device(values: Sequence[Any], device: torch.device) -> Tensor:
    """Numbers, or rows of them, as a tensor on `device`; `torch.tensor(..., device=...)` would wait
    for it."""
    host = torch.tensor(values)
    if device.type == "cpu":
        return host
    return host.pin_memory().to(device, non_blocking=True)
