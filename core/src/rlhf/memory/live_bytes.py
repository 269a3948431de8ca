"""Bytes of tensors that are alive, counted by storage."""

import weakref
from collections.abc import Iterable
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveBytes(TorchDispatchMode):
    """Counts the storages that are made while the mode is on and still alive, on any device
    including meta. Storages of `known` tensors do not count."""

    def __init__(self, known: Iterable[Tensor] = ()) -> None:
        super().__init__()
        self.live = 0
        """Bytes alive now."""
        self._peak = 0
        self._seen: weakref.WeakSet[Any] = weakref.WeakSet(
            tensor.untyped_storage() for tensor in known
        )

    def take_peak(self) -> int:
        """Return the most bytes that were alive at one time since the last call."""
        peak, self._peak = self._peak, self.live
        return peak

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor):
                self._count(leaf.untyped_storage())
        return result

    def _count(self, storage: Any) -> None:
        if storage in self._seen:
            return
        size = storage.nbytes()
        self._seen.add(storage)
        weakref.finalize(storage, self._free, size).atexit = False
        self.live += size
        self._peak = max(self._peak, self.live)

    def _free(self, size: int) -> None:
        self.live -= size
