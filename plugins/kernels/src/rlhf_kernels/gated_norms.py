"""RMS norms with a gate, as recurrent layers have them on their output (Mamba 2, arXiv 2405.21060,
and Gated DeltaNet, arXiv 2412.06464), run by our kernels (`gated_norms_triton.py`).

`norms.py` recognises them. They differ in the gate's activation, in whether it comes before or
after the norm, in the groups in which a row is normed, and in where they round.
"""

from itertools import product
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import silu

from rlhf_kernels.meta import MetaGatedNorm

GATE = "gate"
"""Name of the argument after the hidden states."""
GROUP_SIZE, GROUPS = "group_size", "n_groups"
"""Names of the width and of the number of a norm's groups; a norm has one of them or neither."""


class GatedFormula(NamedTuple):
    """How a norm computes y of x [..., H], a gate of the same shape and its weight w [H]."""

    eps: float
    groups: int
    """Into how many equal parts a row is divided, each with a root mean square of its own."""
    sigmoid: bool
    """Whether the gate goes through a sigmoid (KDA); else through SiLU."""
    first: bool
    """Whether x is gated before it is normed (Mamba 2); else after (Gated DeltaNet)."""
    whole: bool
    """Whether only the result is rounded to x's dtype; else x over its root mean square is, and its
    product with w. The gate's activation is in float32 in both cases."""

    def __call__(self, hidden: Tensor, gate: Tensor, weight: Tensor) -> Tensor:
        """Return y by torch's operators."""
        factor = (torch.sigmoid if self.sigmoid else silu)(gate.float())
        x = hidden.float() * factor if self.first else hidden.float()
        parts = x.unflatten(-1, (self.groups, -1))
        parts = parts * torch.rsqrt(parts.square().mean(-1, keepdim=True) + self.eps)
        x = parts.flatten(-2)
        x = x * weight.float() if self.whole else x.to(hidden.dtype) * weight
        return (x if self.first else x * factor).to(hidden.dtype)


def gated_formulas(module: nn.Module, eps: float, width: int) -> list[GatedFormula]:
    """Return what a module with a weight of `width` numbers may compute of a gate."""
    size, number = (vars(module).get(name) for name in (GROUP_SIZE, GROUPS))
    numbers = (1, number, width // size if isinstance(size, int) and size > 0 else None)
    return [
        GatedFormula(eps, groups, *case)
        for groups in numbers
        if isinstance(groups, int) and groups > 0 and width % groups == 0
        for case in product((False, True), repeat=3)
    ]


def gated_norm(norm: Any, hidden: Tensor, gate: Tensor | None = None) -> Tensor:
    """Return what a norm with a `formula` computes, by our kernel. Its own code runs without a gate
    or with a gate of another shape."""
    from rlhf_kernels.gated_norms_triton import GatedRMSNorm

    if gate is None or gate.shape != hidden.shape:
        return _own(norm, hidden, gate)
    rows = GatedRMSNorm.apply(rows_of(hidden), rows_of(gate), norm.weight, *norm.formula)
    return rows.view(hidden.shape)


def meta_gated_norm(norm: Any, hidden: Tensor, gate: Tensor | None = None) -> Tensor:
    """Return a tensor in the place of what `gated_norm` returns, on the meta device."""
    if gate is None or gate.shape != hidden.shape:
        return _own(norm, hidden, gate)
    rows = MetaGatedNorm.apply(rows_of(hidden), rows_of(gate), norm.weight, norm.formula.groups)
    return rows.view(hidden.shape)


def rows_of(tensor: Tensor) -> Tensor:
    """Return the rows [N, H] of a tensor [..., H], each without gaps. Only what has no such view is
    copied: gates are often slices of a wider product."""
    rows = tensor.reshape(-1, tensor.shape[-1])
    # Code compiled by torch.compile may lay out a slice anew, with other gaps between its rows.
    if rows.stride(-1) == 1 and not torch.compiler.is_compiling():
        return rows
    return rows.contiguous()


def _own(norm: Any, hidden: Tensor, gate: Tensor | None) -> Tensor:
    output: Tensor = type(norm).forward(norm, hidden, gate)
    return output
