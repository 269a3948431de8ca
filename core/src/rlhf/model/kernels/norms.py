"""RMS norms (Zhang and Sennrich, arXiv 1910.07467), found in a model by what they compute and run
by our kernels (`norms_triton.py`).

Families differ in three things, which no name tells for sure; a few numbers through the module do.
"""

import copy
import inspect
from itertools import product
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

EPSILONS = ("variance_epsilon", "eps")
SIZES = (1.0, 3.0, 0.5)
"""Roots of the mean square of the rows that are sent through a module, the last two in roots of its
epsilon."""
CLOSE = 3e-4
"""Relative error of a row in bf16, root of the mean square: a rounding more or less is 1e-3."""


class Formula(NamedTuple):
    """How a norm computes y of x [..., H] and its weight w [H]."""

    eps: float
    offset: float
    """What is added to w: 1 where it is kept as its difference from 1 (Gemma)."""
    whole: bool
    """Rounded to x's dtype once, at the end; else x over its root mean square is rounded before it
    meets w (Llama)."""

    def __call__(self, hidden: Tensor, weight: Tensor) -> Tensor:
        """y by torch's operators."""
        x = hidden.float()
        x = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps)
        if self.whole:
            return (x * (self.offset + weight.float())).to(hidden.dtype)
        return x.to(hidden.dtype) * (self.offset + weight)


def formula_of(module: nn.Module) -> Formula | None:
    """How an RMS norm computes; None for any other module."""
    weight = module._parameters.get("weight")
    eps = next((vars(module)[name] for name in EPSILONS if name in vars(module)), None)
    if weight is None or len(module._parameters) > 1 or not isinstance(eps, float) or eps <= 0:
        return None
    if len(inspect.signature(type(module).forward).parameters) != 2:
        return None  # A gate may come with the numbers.
    # At ZeRO 3 and on the meta device the module's own weight has no values.
    draw = torch.Generator().manual_seed(0)
    shape = getattr(weight, "ds_shape", weight.shape)
    if len(shape) != 1:
        return None
    sizes = torch.tensor([SIZES[0], *(size * eps**0.5 for size in SIZES[1:])], device="cpu")
    sample = sizes[:, None] * torch.randn(len(sizes), *shape, generator=draw, device="cpu")
    drawn = (0.5 * torch.randn(*shape, generator=draw, device="cpu")).bfloat16()
    sample = sample.bfloat16()
    same = copy.copy(module)
    same.__dict__["_parameters"] = {"weight": drawn}
    with torch.no_grad():
        try:
            wanted = type(module).forward(same, sample)
        except Exception:  # A module of another kind may want anything.
            return None
        for offset, whole in product((0.0, 1.0), (False, True)):
            formula = Formula(eps, offset, whole)
            if _error(formula(sample, drawn), wanted) < CLOSE:
                return formula
    return None


def _error(found: Tensor, wanted: Any) -> float:
    """Relative, of the row that is furthest off."""
    if not isinstance(wanted, Tensor) or wanted.shape != found.shape:
        return 1.0
    off = (found.float() - wanted.float()).norm(dim=-1) / wanted.float().norm(dim=-1)
    return float(off.max())


def fuse_norms(model: nn.Module) -> int:
    """Have every RMS norm of `model` run by our kernels; how many. On the meta device, by stand-ins
    that keep what the kernels do."""
    fused = 0
    for module in model.modules():
        formula = formula_of(module)
        if formula is not None:
            weight: Any = module.weight
            module.__dict__["formula"] = formula
            module.__dict__["forward"] = (_unseen if weight.is_meta else _norm).__get__(module)
            fused += 1
    return fused


def _norm(norm: Any, hidden: Tensor) -> Tensor:
    from rlhf.model.kernels.norms_triton import RMSNorm

    return RMSNorm.apply(hidden, norm.weight, *norm.formula)


def _unseen(norm: Any, hidden: Tensor) -> Tensor:
    return UnseenNorm.apply(hidden, norm.weight)


class UnseenNorm(torch.autograd.Function):
    """An RMS norm without values: it keeps its input and one float per row."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor) -> Tensor:
        scale = hidden.new_empty(hidden.shape[:-1], dtype=torch.float32)
        ctx.save_for_backward(hidden, weight, scale)
        return torch.empty_like(hidden)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        hidden, weight, _ = ctx.saved_tensors
        return torch.empty_like(hidden), torch.empty_like(weight)
