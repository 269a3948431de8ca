"""Operations of a training step that would make the host wait for an accelerator, found on the CPU.

On the CPU no tensor says on which device it would be, so `Waits` keeps account of it: tensors that
the host makes are on the host until `Tensor.to` moves them, and so is what is computed only from
such tensors. All others are on the accelerator.
"""

import traceback
from collections.abc import Iterator
from typing import Any, Self

import torch
from attrs import frozen
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.functional import one_hot
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

aten = torch.ops.aten
SIZED_BY_VALUES = {
    aten.nonzero.default, aten.masked_select.default, aten.is_nonzero.default, aten.equal.default,
    aten._unique2.default, aten.unique_dim.default, aten.unique_consecutive.default,
    aten.bincount.default, aten._local_scalar_dense.default,
    aten.masked_scatter_backward.default,
}  # fmt: skip
"""Operators whose result, or its shape, the host gets from the device."""
INDEXED = {
    aten.index.Tensor, aten.index_put.default, aten.index_put_.default,
    aten._index_put_impl_.default, aten._unsafe_index.Tensor, aten._unsafe_index_put.default,
}  # fmt: skip
READ = {Tensor.tolist, Tensor.numpy, Tensor.cpu, Tensor.__array__}
"""Methods that read a tensor without an operator on the CPU."""
MADE = {
    torch.arange, torch.zeros, torch.ones, torch.full, torch.empty, torch.rand, torch.randn,
    torch.randint, torch.randperm, torch.linspace, torch.eye,
}  # fmt: skip
COPIED = {torch.tensor, torch.as_tensor}
"""Functions that copy to `device` from memory that is not page-locked."""
DEVICE = Tensor.device.__get__
"""What is called for `tensor.device`."""
HOST = torch.device("cpu", 0)
"""The device of tensors on the host, of the same type as that of the others."""


@frozen
class Wait:
    """An operation for which the host waits."""

    operation: str
    where: tuple[str, ...]
    """`file:line function` of each caller, the innermost last."""


class Waits:
    """A context that notes the waits of what runs in it, in this thread."""

    def __init__(self) -> None:
        self.found: list[Wait] = []
        self._on_host: set[StorageWeakRef] = set()
        self._functions, self._operators = _Functions(self), _Operators(self)

    def __enter__(self) -> Self:
        self._operators.__enter__()
        self._functions.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._functions.__exit__(*error)
        self._operators.__exit__(*error)

    def note(self, operation: Any) -> None:
        """Note a wait for `operation` of the calling code."""
        frames = traceback.walk_stack(None)
        where = [
            f"{frame.f_code.co_filename}:{line} {frame.f_code.co_name}"
            for frame, line in frames
            if frame.f_code.co_filename != __file__
        ]
        self.found.append(Wait(str(operation), tuple(reversed(where))))

    def is_on_host(self, tensor: Tensor) -> bool:
        return any(_memory(own) in self._on_host for own in _tensors(tensor))

    def place(self, tensors: Any, *, on_host: bool) -> None:
        """Note that new tensors are on the host, or on the accelerator."""
        for tensor in _tensors(tensors):
            if on_host:
                self._on_host.add(_memory(tensor))
            else:
                self._on_host.discard(_memory(tensor))


class _Functions(TorchFunctionMode):
    """Sees what never reaches an operator on the CPU."""

    def __init__(self, waits: Waits) -> None:
        super().__init__()
        self.waits = waits

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        waits, kwargs = self.waits, kwargs or {}
        if types and torch._C._is_torch_function_enabled():
            with self:  # A subclass may answer for itself.
                return types[0].__torch_function__(func, types, args, kwargs)
        if func == DEVICE:
            return HOST if waits.is_on_host(args[0]) else func(*args)
        target = _target(args, kwargs) if func is Tensor.to else None
        if (func in READ or target in ("cpu", HOST)) and not waits.is_on_host(args[0]):
            waits.note(func.__name__)
        elif target is not None and waits.is_on_host(args[0]):
            if not kwargs.get("non_blocking"):
                waits.note("to")
            moved = func(*args, **kwargs)
            moved = moved.clone() if moved is args[0] else moved
            waits.place(moved, on_host=False)
            return moved
        num_found = len(waits.found)
        result = func(*args, **kwargs)
        if func is one_hot:  # It checks classes on the CPU only, but may have to count them.
            del waits.found[num_found + (len(args) == 1 and "num_classes" not in kwargs) :]
        on_host = kwargs.get("device") in (None, HOST)
        if func in MADE:
            waits.place(result, on_host=on_host)
        if func in COPIED and not on_host and args[0] is not result:
            waits.note(func.__name__)
            waits.place(result, on_host=False)
        return result


class _Operators(TorchDispatchMode):
    """Sees operators, also those of backward."""

    def __init__(self, waits: Waits) -> None:
        super().__init__()
        self.waits = waits

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        waits, kwargs = self.waits, kwargs or {}
        inputs = [*_tensors((args, kwargs))]
        on_host = bool(inputs) and all(map(waits.is_on_host, inputs))
        if not on_host and self._waits(func, args, kwargs):
            waits.note(func)
        result = func(*args, **kwargs)
        if func is aten.lift_fresh.default:
            waits.place(result, on_host=True)
        elif inputs:
            known = {_memory(tensor) for tensor in inputs}
            new = [tensor for tensor in _tensors(result) if _memory(tensor) not in known]
            waits.place(new, on_host=on_host)
        return result

    def _waits(self, func: Any, args: Any, kwargs: Any) -> bool:
        if func is aten.repeat_interleave.Tensor:
            return kwargs.get("output_size") is None
        if func in INDEXED:
            return any(it.dtype in (torch.bool, torch.uint8) for it in _tensors(args[1]))
        if func is aten.copy_.default:
            target, source, *rest = args
            places = {self.waits.is_on_host(target), self.waits.is_on_host(source)}
            return len(places) == 2 and not (rest or [kwargs.get("non_blocking")])[0]
        return func in SIZED_BY_VALUES


def _target(args: Any, kwargs: Any) -> str | torch.device | None:
    """Return the device that arguments of `Tensor.to` name."""
    values = (it.device if isinstance(it, Tensor) else it for it in (*args[1:], *kwargs.values()))
    return next((it for it in values if isinstance(it, str | torch.device)), None)


def _tensors(values: Any) -> Iterator[Tensor]:
    leaves = (leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor))
    # Inside of `torch.vmap` a tensor has no memory of its own.
    return (leaf for leaf in leaves if not torch._C._functorch.is_batchedtensor(leaf))


def _memory(tensor: Tensor) -> StorageWeakRef:
    return StorageWeakRef(tensor.untyped_storage())
