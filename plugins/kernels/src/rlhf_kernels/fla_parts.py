"""The parts of gated linear attention in flash-linear-attention.

Its functions of states read on the host how many chunks there are, for which they wait in every
layer. Here they get it from the number of `chunk_indices`. Some of their kernels have 48
configurations, which Triton times at their first use. Here they have the one of `tuned.json`.
"""

from collections.abc import Callable
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from rlhf_kernels.mamba import Parts
from rlhf_kernels.paths import CHUNK
from rlhf_kernels.scans import tuned_configs

# Raises ImportError if it is not installed.
_states: Any = import_module("fla.ops.common.chunk_h")
_outputs: Any = import_module("fla.ops.common.chunk_o")
_utils: Any = import_module("fla.ops.utils")


class Offsets(Tensor):
    """The chunk with which each sequence starts and their `number` at the end [S + 1]."""

    number: int

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.__getitem__ and args[1] == -1:
            return torch.tensor(args[0].number)
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **kwargs or {})


def without_wait(own: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Return the library's function of offsets, whose results know the number that `counted` has
    left at `cu_seqlens`."""

    def offsets(cu_seqlens: Any, chunk_size: int) -> Tensor:
        found = own(cu_seqlens, chunk_size)
        if chunk_size == CHUNK and hasattr(cu_seqlens, "num_chunks"):
            found = found.as_subclass(Offsets)
            found.number = cu_seqlens.num_chunks
        return found

    return offsets


def counted(own: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function of states that also takes `chunk_indices`."""

    def run(*, cu_seqlens: Any, chunk_indices: Tensor | None, **arguments: Any) -> Any:
        if chunk_indices is not None:
            cu_seqlens.num_chunks = len(chunk_indices)
        return own(cu_seqlens=cu_seqlens, **arguments)

    return run


def use_tuned(module: Any) -> None:
    """Have the kernels of a module that are under `triton.autotune` run in one configuration."""
    for name, options in tuned_configs().items():
        tuner = getattr(module, name, None)
        while tuner is not None and not hasattr(tuner, "configs"):
            tuner = tuner.fn  # Below heuristics.
        if tuner is not None:
            launch = {key: options[key] for key in ("num_warps", "num_stages")}
            tiles = {key: value for key, value in options.items() if key not in launch}
            tuner.configs = [type(tuner.configs[0])(tiles, **launch)]


use_tuned(_states)
use_tuned(_outputs)
_states.prepare_chunk_offsets = without_wait(_states.prepare_chunk_offsets)
PARTS = Parts(
    sums=_utils.chunk_local_cumsum,
    states=counted(_states.chunk_fwd_h),
    output=_outputs.chunk_fwd_o,
    for_states=counted(_states.chunk_bwd_dh),
    for_inputs=_outputs.chunk_bwd_dqkwg,
    for_values=_outputs.chunk_bwd_dv,
)
