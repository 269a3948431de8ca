"""How far the host may be ahead of the device under ZeRO-3: as far as memory allows, with the
gathering of weights behind their update."""

from collections import deque
from collections.abc import Callable
from typing import Any

from deepspeed.accelerator import get_accelerator
from torch import nn

from rlhf_plugin_deepspeed.memory import MOST_LIVE
from rlhf_plugin_deepspeed.patches.install import check_target, replace


def fence_of(offload: Any) -> Callable[[], None]:
    """Return a function that keeps gatherings, which run on a stream of their own, behind an update
    that was launched. `offload` is DeepSpeed's for one engine."""
    stream = getattr(offload, check_target("gather-after-update", offload, "__allgather_stream"))
    accelerator = get_accelerator()
    if accelerator.is_synchronized_device():
        return lambda: None
    return lambda: stream.wait_stream(accelerator.current_stream())


class Backlog:
    """Keeps the host from gathering too far ahead of the device.

    What the host has released still takes memory until the device has read it for the last time.
    DeepSpeed counts it as free, and bounds the number of gatherings under way instead. Here more is
    gathered as long as what is gathered and what is not yet read are at most `limit` elements
    together, however far ahead the host is.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._unread: deque[tuple[Any, int]] = deque()
        """Events after the last use of what was released, with its elements; the oldest first."""
        self._elements = 0

    def released(self, elements: int) -> None:
        """Note that the host has released `elements`, which the current stream may still read."""
        event = get_accelerator().Event()
        event.record()
        self._unread.append((event, elements))
        self._elements += elements

    def make_room(self, gathered: int) -> None:
        """Wait until there is room beside `gathered` elements."""
        while self._unread:
            event, elements = self._unread[0]
            if not event.query():
                if gathered + self._elements <= self.limit:
                    return
                event.synchronize()
            self._unread.popleft()
            self._elements -= elements


def run_ahead(offload: Any, layer: int) -> None:
    """Bound by memory how far ahead the host gathers. `layer` is the elements of the largest layer,
    0 without layers; `offload` is DeepSpeed's for one engine."""
    if get_accelerator().is_synchronized_device() or not layer:
        return
    coordinator = offload.get_param_coordinator()
    available = check_target("run-ahead", coordinator, "__n_available_params")
    fetch, release = coordinator.fetch_sub_module, coordinator.release_sub_module
    backlog = Backlog(MOST_LIVE)

    def fetch_sub_module(current_submodule: nn.Module, forward: bool) -> None:
        backlog.make_room(getattr(coordinator, available))
        fetch(current_submodule, forward)

    def release_sub_module(submodule: nn.Module, forward: bool = False) -> None:
        before = getattr(coordinator, available)
        release(submodule, forward)
        released = before - getattr(coordinator, available)
        if released:
            backlog.released(released)

    replace(
        "run-ahead",
        coordinator,
        fetch_sub_module=fetch_sub_module,
        release_sub_module=release_sub_module,
        # A gathering under way takes its elements twice, until they are copied to their places.
        __max_ongoing_fetch_events=max(2, backlog.limit // (6 * layer)),
    )
