"""Values on the meta device, as far as they follow from a batch: models that read images read the
sizes and masks of images."""

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map_only, tree_unflatten

META, HOST = torch.device("meta"), torch.device("cpu")


@contextmanager
def known_values() -> Iterator[Callable[[Tensor], Tensor]]:
    """Return what moves a tensor to the meta device so that code in the body can read its values
    there, and what is computed of such values only."""
    values = KnownValues()
    with values, Literals(values):
        yield values.to_meta


class KnownValues(TorchDispatchMode):
    """Computes on the CPU what follows from tensors whose values are known there."""

    def __init__(self) -> None:
        super().__init__()
        self._storages: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()
        """By storages on the meta device, those on the CPU with their values. Views share them."""

    def to_meta(self, tensor: Tensor) -> Tensor:
        """Return a tensor on the meta device whose values are those of `tensor`."""
        values = tensor.detach().clone()
        moved = torch.empty_strided(values.shape, values.stride(), dtype=values.dtype, device=META)
        self._storages[moved.untyped_storage()] = values.untyped_storage()
        return moved

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        leaves, spec = tree_flatten((args, kwargs))
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        known = all(not it.is_meta or it.untyped_storage() in self._storages for it in tensors)
        if func.is_view or not known or "empty" in func.name():
            if func is torch.ops.aten.index.Tensor:
                args = args[0], self._positions(args[1])
            if func._schema.is_mutable:
                self._storages.pop(args[0].untyped_storage(), None)
            return func(*args, **kwargs)
        to_meta = any(tensor.is_meta for tensor in tensors)
        if kwargs.get("device") is not None:
            to_meta = kwargs["device"] == META
        if not tensors and to_meta and func(*args, **kwargs).is_floating_point():
            return func(*args, **kwargs)  # It may be large, and sizes are integers.
        values = [self._values(leaf) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        own, options = tree_unflatten(values, spec)
        if "device" in options:
            options["device"] = HOST
        result = func(*own, **options)
        if func._schema.is_mutable:
            return func(*args, **kwargs)
        return tree_map_only(Tensor, self.to_meta, result) if to_meta else result

    def _values(self, tensor: Tensor) -> Tensor | None:
        """Return a tensor on the CPU with the values of `tensor`; None if they are not known."""
        storage = self._storages.get(tensor.untyped_storage())
        if storage is None:
            return None if tensor.is_meta else tensor
        values = torch.empty(0, dtype=tensor.dtype)
        return values.set_(storage, tensor.storage_offset(), tensor.shape, tensor.stride())

    def _positions(self, indices: Any) -> list[Tensor | None]:
        """Return the indices of a tensor, masks as the positions that they select."""
        found: list[Tensor | None] = []
        for index in indices:
            values = None if index is None else self._values(index)
            if values is None or values.dtype != torch.bool:
                found.append(index)
            else:
                found += map(self.to_meta, values.nonzero(as_tuple=True))
        return found


class Literals(TorchFunctionMode):
    """Makes known what `torch.tensor` creates, which no dispatch mode sees."""

    def __init__(self, values: KnownValues) -> None:
        super().__init__()
        self._values = values

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        options = kwargs or {}
        result = func(*args, **options)
        if func is torch.tensor and result.is_meta:
            return self._values.to_meta(func(*args, **options | {"device": HOST}))
        return result
