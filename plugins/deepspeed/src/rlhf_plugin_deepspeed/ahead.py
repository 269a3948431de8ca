"""How far the host may be ahead of the device under ZeRO-3: as far as memory allows, and gatherings
stay behind the update of what they gather. DeepSpeed's names are those of 0.19.0 to 0.19.8."""

from collections import deque
from collections.abc import Callable
from typing import Any

from deepspeed.accelerator import get_accelerator
from torch import nn

from rlhf_plugin_deepspeed.gathering import coordinator_of
from rlhf_plugin_deepspeed.memory import MOST_LIVE


def fence_of(offload: Any) -> Callable[[], None]:
    """What keeps gatherings, which run on a stream of their own, behind an update of the weights
    that was launched. `offload` is DeepSpeed's for one engine."""
    accelerator = get_accelerator()
    if accelerator.is_synchronized_device():
        return lambda: None
    stream = getattr(offload, "_DeepSpeedZeRoOffload__allgather_stream", None)
    if stream is None:
        # A later DeepSpeed may call it something else.
        return lambda: accelerator.current_stream().synchronize()
    return lambda: stream.wait_stream(accelerator.current_stream())


class Backlog:
    """Keeps the host from gathering too far ahead of the device.

    What is released on the host is memory until the device has read it for the last time. DeepSpeed
    counts it as gone, and bounds the number of gatherings that are under way instead. Here more is
    gathered when what is gathered and what is not yet read are at most `limit` elements together,
    however far ahead the host is.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._read: deque[tuple[Any, int]] = deque()
        """Events after the last use of what was released, with its elements; the oldest first."""
        self._elements = 0

    def released(self, elements: int) -> None:
        """So many elements are given up by the host; the current stream may still read them."""
        event = get_accelerator().Event()
        event.record()
        self._read.append((event, elements))
        self._elements += elements

    def make_room(self, gathered: int) -> None:
        """Wait until there is room beside so many elements that are gathered."""
        while self._read:
            event, elements = self._read[0]
            if not event.query():
                if gathered + self._elements <= self.limit:
                    return
                event.synchronize()
            self._read.popleft()
            self._elements -= elements


def run_ahead(offload: Any, layer: int) -> None:
    """Let the host gather ahead as far as memory allows, and not two gatherings; `layer` is the
    elements of the largest layer. `offload` is DeepSpeed's for one engine."""
    coordinator, name = coordinator_of(offload)
    if get_accelerator().is_synchronized_device() or not layer or name is None:
        return
    gathered = f"{name}n_available_params"
    backlog = Backlog(MOST_LIVE)
    fetch, release = coordinator.fetch_sub_module, coordinator.release_sub_module

    def fetch_sub_module(module: nn.Module, forward: bool) -> None:
        backlog.make_room(getattr(coordinator, gathered))
        fetch(module, forward)

    def release_sub_module(module: nn.Module, forward: bool = False) -> None:
        before = getattr(coordinator, gathered)
        release(module, forward)
        gone = before - getattr(coordinator, gathered)
        if gone:
            backlog.released(gone)

    coordinator.fetch_sub_module = fetch_sub_module
    coordinator.release_sub_module = release_sub_module
    # One under way takes its elements twice, until they are copied to their places.
    under_way = max(2, backlog.limit // (6 * layer))
    setattr(coordinator, f"{name}max_ongoing_fetch_events", under_way)
