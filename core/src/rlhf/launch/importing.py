"""Faster imports: without what no run uses, without collections, and while the device opens."""

import atexit
import gc
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from ctypes import CDLL
from importlib import import_module
from threading import Thread
from typing import Any

from rlhf.launch.caches import keep_compiled
from rlhf.launch.garbage import without_collections

UNUSED = ("scipy", "sklearn", "torchao")
"""What transformers imports where it is installed, for object detection, for a way of assisted
generation and for models in quantized formats that are refused."""


@contextmanager
def importing() -> Iterator[None]:
    """Import libraries without collections, which would take a third of the time and find nothing.
    If transformers is among them, what exists afterwards is excluded from later collections."""
    # After a failed run, what it has left in cycles must still be found.
    first = "transformers" not in sys.modules
    keep_compiled()
    with without_collections():
        try:
            yield
        finally:
            if first:
                gc.freeze()
                # Some bindings report what is not collected at the end as leaks.
                atexit.register(gc.unfreeze)


@contextmanager
def importing_rank() -> Iterator[None]:
    """Open the device and import, as `importing` does, what a rank needs; transformers without what
    no run uses."""
    first = "transformers" not in sys.modules
    with hiding(*UNUSED if first else ()) as hidden, importing(), opening_device():
        if first:
            import_module("transformers")
        yield
    for name in hidden:
        # transformers remembers which packages it has found; another version may not.
        with suppress(AttributeError):
            getattr(sys.modules["transformers.utils"], f"is_{name}_available").cache_clear()


@contextmanager
def hiding(*packages: str) -> Iterator[set[str]]:
    """Let imports in the body find none of these packages, except those that are imported already.
    Yields the others."""
    modules: dict[str, Any] = sys.modules
    hidden = {*packages} - {*modules}
    modules |= dict.fromkeys(hidden)
    try:
        yield hidden
    finally:
        for name in hidden:
            del modules[name]


@contextmanager
def opening_device() -> Iterator[None]:
    """Open this rank's CUDA device in a thread while the body imports modules. The libraries of
    CUDA do this without Python's interpreter lock, so the imports continue."""
    import torch  # late: start-up time

    thread = Thread(target=_open_device)
    # Whether there is a device is found out in the thread: it takes 0.2 s.
    if torch.backends.cuda.is_built():
        thread.start()
    try:
        yield
    finally:
        if thread.ident is not None:
            thread.join()


def _open_device() -> None:
    """Create the device's context, and have Triton compute the digest of itself, which is part of
    every kernel's key."""
    import torch

    with suppress(Exception):  # Whatever fails here is reported where it is needed.
        # torch would open the driver while it holds the interpreter lock.
        if torch.version.cuda is not None:
            CDLL("libcuda.so.1").cuInit(0)
        with torch.cuda.device(int(os.environ.get("LOCAL_RANK", "0"))):
            torch.cuda.synchronize()
        # torch for CUDA brings Triton. Its module imports nothing of torch, whose modules the other
        # thread may be importing.
        import_module("triton.runtime.cache").triton_key()
