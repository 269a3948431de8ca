"""Where fused kernels run."""

from functools import cache
from importlib.util import find_spec

import torch


@cache
def fused_on(kind: str) -> bool:
    """Whether a kind of device ("cuda", "cpu") runs kernels written in Triton. The meta device, on
    which a run is rehearsed, speaks for the machine's accelerator."""
    if kind == "meta":
        kind = "cuda" if torch.cuda.is_available() else "cpu"
    return kind == "cuda" and find_spec("triton") is not None
