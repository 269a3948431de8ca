"""What torch.compile must know to make one form of a function for rows of all lengths."""

import torch
from torch import Tensor

COMPILED_KINDS = 64
"""Compiled forms of one function (kinds of layers times modes) before torch falls back to eager."""


def mark_any_size(tensor: Tensor, *dims: int) -> None:
    """Have torch.compile treat `dims` as unknown from the first row on. It would compile for the
    sizes of that row, and once more for the next row."""
    for dim in dims:
        torch._dynamo.maybe_mark_dynamic(tensor, dim)


def let_recompile() -> None:
    """Allow as many compiled forms of one function as models have kinds of layers."""
    dynamo = torch._dynamo.config
    dynamo.recompile_limit = max(dynamo.recompile_limit, COMPILED_KINDS)
