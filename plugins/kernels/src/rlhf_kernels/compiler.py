"""What torch.compile must know to make one form of a function for rows of all lengths."""

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor

COMPILED_KINDS = 64
"""Compiled forms of one function (kinds of layers times modes) before torch falls back to eager."""


def mark_any_size(tensor: Tensor, *dims: int) -> None:
    """Have torch.compile treat `dims` as unknown from the first row on, and the other dimensions as
    constant. It would compile for the sizes of the first row, and once more for the next one; and
    it would treat as unknown whatever differs in a second model."""
    for dim in range(tensor.dim()):
        if dim in dims:
            torch._dynamo.maybe_mark_dynamic(tensor, dim)
        else:
            torch._dynamo.mark_static(tensor, dim)


def let_recompile() -> None:
    """Allow as many compiled forms of one function as models have kinds of layers, each with the
    numbers of its layers, such as the scale of attention."""
    dynamo = torch._dynamo.config
    dynamo.recompile_limit = max(dynamo.recompile_limit, COMPILED_KINDS)
    dynamo.specialize_float = True


@cache
def for_any_rows(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function of tensors with n rows, compiled once for any n."""
    compiled = torch.compile(function)

    def call(*tensors: Tensor, **options: Any) -> Any:
        for tensor in tensors:
            mark_any_size(tensor, 0)
        return compiled(*tensors, **options)

    return call
