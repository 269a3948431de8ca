"""Tensors on a device of which the host knows the values, or how many entries they select."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor

from rlhf.engine import on_device


@contextmanager
def one_thread() -> Iterator[None]:
    """Run operators on the CPU only in this thread. They take microseconds for some ten thousand
    patches, but milliseconds if they wait for threads on busy cores, as beside the thread that
    packs."""
    with ExitStack() as stack:
        stack.callback(torch.set_num_threads, torch.get_num_threads())
        torch.set_num_threads(1)
        yield


def moved(device: torch.device, values: Tensor) -> Tensor:
    """Return `values` of the host on a device, with themselves as `host`."""
    result: Any = on_device(values, device).detach()
    result.host = values
    return result


def with_sizes(value: Any) -> Any:
    """Return sizes that are on the host too as `Sizes`, other arguments as they are."""
    if not hasattr(value, "host"):
        return value
    sizes = value.as_subclass(Sizes)
    sizes.host = value.host
    return sizes


READ = {Tensor.tolist, Tensor.item, Tensor.__bool__, Tensor.unbind}
"""Functions that read sizes."""
COMPUTED = {
    Tensor.__floordiv__, Tensor.mul, Tensor.prod, Tensor.sum, Tensor.all, Tensor._is_all_true,
    Tensor.__eq__, Tensor.ne, Tensor.gt, Tensor.le, Tensor.__invert__, Tensor.__getitem__,
    Tensor.to, Tensor.detach,
}  # fmt: skip
"""Functions of sizes whose results the host computes too."""


class Sizes(Tensor):
    """Sizes of images, or positions or masks of their patches, on a device, with their values on
    the `host`. The sizes of one image are only on the host."""

    host: Tensor

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        own: Any = args[0] if args else None
        known = isinstance(own, cls)
        if known and (func in READ or (func is Tensor.__getitem__ and isinstance(args[1], int))):
            return func(own.host, *args[1:], **kwargs)
        with torch._C.DisableTorchFunctionSubclass():
            result = func(*args, **kwargs)
        if not known or func not in COMPUTED:
            return result
        others = args[1] if len(args) > 1 and isinstance(args[1], tuple) else args[1:]
        if all(isinstance(it, cls) for it in others if isinstance(it, Tensor)):
            values = [it.host if isinstance(it, cls) else it for it in args]
            with one_thread():
                to = func is Tensor.to
                host = values[0].to(result.dtype) if to else func(*values, **kwargs)
            result = result.as_subclass(cls)
            result.host = host
        elif func is Tensor.gt:
            # LFM2-VL compares with the numbers from 0 on, of which so many are less.
            result = Placeholders.of(result, int(own.host.sum()))
        return result


VIEWS = {Tensor.__getitem__, Tensor.unsqueeze, Tensor.to}


class Placeholders(Tensor):
    """A mask [B, T] or [B, T, 1] of what stands for images, such as tokens."""

    places: Any = None
    """Their indices [N] in the B * T; None if the host does not know their number yet."""

    @classmethod
    def of(cls, mask: Tensor, number: int) -> "Placeholders":
        """Return a mask [B, T] that selects so many."""
        result = mask.as_subclass(cls)
        result.find(number)
        return result

    def find(self, number: int) -> None:
        """Find the places in a mask [B, T] that selects so many."""
        mask = self.as_subclass(Tensor).flatten()
        torch._assert_async(
            mask.sum() == number,
            "the tokens that stand for images are not as many as their features",
        )
        self.places = mask.byte().argsort(descending=True, stable=True)[:number]

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        mask = args[1] if func is Tensor.masked_scatter else args[0]
        places = mask.places if isinstance(mask, cls) else None
        if places is not None:
            if func is Tensor.masked_scatter:
                row, _, features = args
                rows, features = row.flatten(0, 1), features.reshape(-1, row.shape[-1])
                return rows.index_copy(0, places, features).view_as(row)
            if func is Tensor.sum and len(args) == 1 and not kwargs:
                return torch.tensor(len(places))
            if func is Tensor.flatten:
                return places  # They index as the mask does.
            if func is Tensor.expand_as:
                return Indices.of(mask)
        with torch._C.DisableTorchFunctionSubclass():
            result = func(*args, **kwargs or {})
        if places is not None and func in VIEWS and result.shape[:2] == mask.shape[:2]:
            result = result.as_subclass(cls)
            result.places = places
        return result


class Indices(tuple[Tensor, ...]):
    """Indices [N] of rows, and in a row, of what a mask [B, T] selects. They take its place as an
    index and in `masked_scatter`."""

    @classmethod
    def of(cls, mask: Placeholders) -> "Indices":
        """Return the indices of what a mask selects."""
        return cls((mask.places // mask.shape[1], mask.places % mask.shape[1]))

    def to(self, _: torch.device) -> "Indices":
        """Return them as they are, on the device of the mask."""
        return self

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert func is Tensor.masked_scatter
        row, indices, features = args
        return row.index_put(tuple(indices), features.reshape(-1, row.shape[-1]))
