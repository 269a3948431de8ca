"""When Python collects garbage."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def without_collections() -> Iterator[None]:
    """Run the body without collections, which would go through the many objects that it makes and
    find next to nothing."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def collect(device: str) -> None:
    """Free what dead cycles keep on an accelerator; on the CPU, collections come by themselves."""
    if device != "cpu":
        gc.collect()
