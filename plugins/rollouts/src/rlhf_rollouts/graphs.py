"""Decode steps as graphs of the device, which are launched at once. Without them a step of a small
model takes as long as its kernels take to launch."""

from collections.abc import Callable
from typing import Any

import torch
from attrs import define, field


@define(eq=False)
class Graphs:
    """Runs a step: with each key once as it is, then captures it, and from then on replays it."""

    device: torch.device | None = None
    """The device that captures; None for one that does not."""
    stream: Any = None
    """The device's stream on which it captures."""
    failure: str = ""
    """Why a step could not be captured."""
    _graphs: dict[Any, Any] = field(factory=dict, init=False)
    _pool: Any = field(default=None, init=False)

    def run(self, key: Any, step: Callable[[], None]) -> None:
        """Run `step`, whose shapes depend only on `key` and whose tensors stay in place."""
        graph = self._graphs.get(key)
        if graph is not None:
            graph.replay()
            return
        step()
        if self.device is not None:
            self._capture(key, step)

    def _capture(self, key: Any, step: Callable[[], None]) -> None:
        device = torch.get_device_module(self.device)
        if self._pool is None:
            self._pool = device.graph_pool_handle()
        graph, stream = device.CUDAGraph(), self.stream
        stream.wait_stream(device.current_stream(self.device))
        try:
            with device.stream(stream):
                # Other threads may use the device meanwhile.
                graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
                try:
                    step()
                finally:
                    graph.capture_end()
        except RuntimeError as error:
            self.failure = str(error).splitlines()[0]
            self.device = None
            return
        device.current_stream(self.device).wait_stream(stream)
        self._graphs[key] = graph


def captures(device: torch.device) -> bool:
    """Return whether a device can capture graphs."""
    return device.type != "cpu" and hasattr(torch.get_device_module(device), "CUDAGraph")
