"""Control of Python's garbage collection."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def without_collections() -> Iterator[None]:
    """Disable garbage collection in the body, which creates many objects but little garbage."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def collect(device: str) -> None:
    """Collect garbage if `device` is an accelerator, whose memory unreachable cycles may hold. On
    the CPU, automatic collections suffice."""
    if device != "cpu":
        gc.collect()
