"""Kernels of tree attention that are compiled, or loaded from their cache, before they are needed:
in threads, while weights are read."""

from collections.abc import Iterable
from contextlib import suppress
from threading import Thread
from typing import NamedTuple

import torch
from torch import Tensor

from rlhf.model.masks import BLOCK


class Heads(NamedTuple):
    """What the kernels of an attention are compiled for."""

    heads: int
    key_heads: int
    width: int
    """Numbers of a query and a key."""
    of_value: int
    """Numbers of a value."""
    dtype: torch.dtype
    scale: float
    softcap: float | None


REHEARSED: set[Heads] = set()
"""The attentions that rehearsals in this process have met."""

_threads: dict[str, Thread] = {}
"""By what waits for them."""


def compile_ahead(kinds: Iterable[Heads], device: torch.device) -> None:
    """Begin to compile the kernels for `kinds` of attention. The first forward and the first
    backward wait for theirs."""
    for name in ("forward", "backward"):
        _threads[name] = Thread(target=_compile, args=(name, tuple(kinds), device))
        _threads[name].start()


def await_compiled(name: str) -> None:
    """Wait for what is being compiled for "forward" or "backward"."""
    thread = _threads.pop(name, None)
    if thread is not None:
        thread.join()


def _compile(name: str, kinds: Iterable[Heads], device: torch.device) -> None:
    # Whatever fails here is reported where the kernel runs.
    with suppress(Exception), torch.get_device_module(device).device(device):
        for kind in kinds:
            compile_kind(name, kind)


def compile_kind(name: str, kind: Heads) -> None:
    """Compile what "forward" or "backward" runs, for this process's device."""
    from rlhf.model.kernels.tree import attend, differentiate

    query, key, value, output, lse, bounds = _inputs(kind)
    if name == "forward":
        attend(query, key, value, bounds, kind.scale, kind.softcap)
    else:
        differentiate(output, lse, query, key, value, bounds, output, lse, kind.scale, kind.softcap)


def _inputs(kind: Heads) -> list[Tensor]:
    """Return query, key, value, output, log-sum-exp and bounds without values."""
    shapes = (
        (kind.heads, kind.width), (kind.key_heads, kind.width), (kind.key_heads, kind.of_value),
        (kind.heads, kind.of_value),
    )  # fmt: skip
    # In memory the heads of a token are adjacent, as rotary embeddings leave them.
    row = [
        torch.empty(1, BLOCK, heads, width, dtype=kind.dtype, device="meta").transpose(1, 2)
        for heads, width in shapes
    ]
    # The default precision is another one while transformers makes a model.
    lse = torch.empty(1, kind.heads, BLOCK, dtype=torch.float32, device="meta")
    return [*row, lse, torch.empty(5, BLOCK, dtype=torch.int32, device="meta")]
