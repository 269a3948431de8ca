"""Operators over meta tensors, each called once for all tensors of equal forms."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

PLAIN = (Tensor, nn.Parameter)


class MetaCalls:
    """Calls operators. On the meta device, torch computes the forms of most results in Python;
    results with memory of their own are made from those of an equal call before, such as the same
    one in another layer."""

    def __init__(self) -> None:
        self._known: dict[Any, Any] = {}
        """The forms of a call's results, as `_forms` returns them."""

    def __call__(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return what `function` returns."""
        try:
            call = (function, _described(args), _described([*kwargs.items()]))
            known = self._known.get(call)
        except TypeError:  # Not hashable.
            return function(*args, **kwargs)
        if known:
            made = tuple(_made(form) for form in known)
            return made if len(made) > 1 else made[0]
        result = function(*args, **kwargs)
        if call not in self._known:
            self._known[call] = _forms(result, tree_leaves((args, kwargs)))
        return result


def _described(value: Any) -> Any:
    """Return all of an argument that decides on the forms of results. Raises TypeError for a tensor
    that has more than shape, strides and dtype."""
    if isinstance(value, Tensor):
        if type(value) not in PLAIN or not value.is_meta or value.is_complex():
            raise TypeError
        return value.shape, value.stride(), value.dtype
    if isinstance(value, (list, tuple)):
        return tuple(map(_described, value))
    return type(value), value


def _forms(result: Any, arguments: list[Any]) -> list[tuple[Any, ...]] | None:
    """Return shape, strides and dtype of each result; None unless all are meta tensors and each has
    exactly its own memory."""
    results = result if isinstance(result, tuple) else (result,)
    taken = {_storage(each) for each in arguments if isinstance(each, Tensor)}
    forms = []
    for each in results:
        if type(each) is not Tensor or not each.is_meta or _storage(each) in taken:
            return None
        taken.add(_storage(each))
        forms.append((each.shape, each.stride(), each.dtype))
        if _made(forms[-1]).untyped_storage().nbytes() != each.untyped_storage().nbytes():
            return None
    return forms or None


def _made(form: tuple[Any, ...]) -> Tensor:
    shape, strides, dtype = form
    return torch.empty_strided(shape, strides, dtype=dtype, device="meta")


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata
