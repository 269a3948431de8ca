"""RMS norms (Zhang and Sennrich, arXiv 1910.07467), recognised by what they compute and run by our
kernels (`norms_triton.py`), with a gate or without (`gated_norms.py`).

Families differ in three things that a class name does not show: the epsilon, whether 1 is added to
the weight, and where they round. A few numbers sent through a module show all three.
"""

import copy
import inspect
from collections.abc import Hashable, Sequence
from itertools import product
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from rlhf.engine import replace_forward, whole_shape
from rlhf_kernels.gated_norms import (
    GATE,
    GatedFormula,
    gated_formulas,
    gated_norm,
    meta_gated_norm,
)
from rlhf_kernels.meta import MetaNorm

EPSILONS = ("variance_epsilon", "eps")
"""Names of a norm's epsilon."""
PROBE_SIZES = (1.0, 3.0, 0.5)
"""Root mean squares of the rows that are sent through a module; the last two are multiples of the
root of its epsilon, where the epsilon's place in the formula shows."""
GATE_SIZES = (30.0, 1.0, 1.0)
"""Root mean squares of their gates, one of them so large that a limit of the activation shows."""
EVERY_MODULE = frozenset(vars(nn.Module()))
"""Names of the attributes that torch gives every module."""
NORM_TOLERANCE = 3e-4
"""Largest relative error of a row in bf16; one rounding more or less gives 1e-3."""


class Formula(NamedTuple):
    """How a norm computes y of x [..., H] and its weight w [H]."""

    eps: float
    offset: float
    """What is added to w: 1 in families that store w - 1 (Gemma), else 0."""
    whole: bool
    """Whether only the result is rounded to x's dtype (Gemma); else x over its root mean square is
    rounded before it is multiplied by w (Llama)."""

    def __call__(self, hidden: Tensor, weight: Tensor) -> Tensor:
        """Return y by torch's operators."""
        x = hidden.float()
        x = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps)
        if self.whole:
            return (x * (self.offset + weight.float())).to(hidden.dtype)
        return x.to(hidden.dtype) * (self.offset + weight)


def formula_of(module: nn.Module) -> Formula | GatedFormula | None:
    """Return how an RMS norm computes, with a gate if it takes one; None for any other module."""
    weight = module._parameters.get("weight")
    eps = next((vars(module)[name] for name in EPSILONS if name in vars(module)), None)
    if weight is None or len(module._parameters) > 1 or not isinstance(eps, float) or eps <= 0:
        return None
    others = [*inspect.signature(type(module).forward).parameters][2:]
    shape = whole_shape(weight)
    if len(shape) != 1 or others not in ([], [GATE]):
        return None
    formulas: Sequence[Formula | GatedFormula] = (
        gated_formulas(module, eps, shape[0]) if others else plain_formulas(eps)
    )
    *inputs, drawn = tensors = _probe(shape, eps, gated=bool(others))
    same = copy.copy(module)
    same.__dict__["_parameters"] = {"weight": drawn}
    with torch.no_grad():
        try:
            actual = type(module).forward(same, *inputs)
        except Exception:  # A module of another kind may need anything.
            return None
        for formula in formulas:
            if _error(formula(*tensors), actual) < NORM_TOLERANCE:
                return formula
    return None


def plain_formulas(eps: float) -> list[Formula]:
    """Return what a module without a gate may compute."""
    return [Formula(eps, *case) for case in product((0.0, 1.0), (False, True))]


def _kind(module: nn.Module) -> Hashable | None:
    """Return what modules that compute alike have in common: their class, the names of their
    parameters, the shape of their weight and their own attributes. None if an attribute is more
    than a number or a name, and for modules without an epsilon."""
    own = {name: value for name, value in vars(module).items() if name not in EVERY_MODULE}
    weight = module._parameters.get("weight")
    if weight is None or module._buffers or module._modules or not own.keys() & {*EPSILONS}:
        return None
    if not all(isinstance(value, bool | int | float | str | None) for value in own.values()):
        return None
    names = tuple(module._parameters)
    return type(module), names, whole_shape(weight), module.training, tuple(own.items())


def _probe(shape: torch.Size, eps: float, *, gated: bool) -> list[Tensor]:
    """Return rows [3, H], with `gated` their gates, and a weight [H] in bf16 on the CPU: at ZeRO-3
    and on the meta device the module's own weight has no values."""
    draw = torch.Generator().manual_seed(0)
    first, *others = PROBE_SIZES
    sizes = torch.tensor([first, *(size * eps**0.5 for size in others)], device="cpu")
    sample = sizes[:, None] * torch.randn(len(sizes), *shape, generator=draw, device="cpu")
    weight = 0.5 * torch.randn(*shape, generator=draw, device="cpu")
    gate = torch.randn(sample.shape, generator=draw, device="cpu")
    gate *= torch.tensor(GATE_SIZES, device="cpu")[:, None]
    drawn = [sample, gate, weight] if gated else [sample, weight]
    return [tensor.bfloat16() for tensor in drawn]


def _error(value: Tensor, expected: Any) -> float:
    """Return the largest relative error of a row; 1 for another shape."""
    if not isinstance(expected, Tensor) or expected.shape != value.shape:
        return 1.0
    error = (value.float() - expected.float()).norm(dim=-1) / expected.float().norm(dim=-1)
    return float(error.max())


def fuse_norms(model: nn.Module) -> int:
    """Have every RMS norm of `model` run our kernels, on the meta device stand-ins that keep what
    the kernels keep. Return how many there are."""
    fused = 0
    known: dict[Hashable, Formula | GatedFormula | None] = {}
    for module in model.modules():
        kind = _kind(module)
        if kind is None or kind not in known:
            known[kind] = formula_of(module)
        formula = known[kind]
        if formula is not None:
            real, meta = _norm, _meta_norm
            if isinstance(formula, GatedFormula):
                real, meta = gated_norm, meta_gated_norm
            weight: Any = module.weight
            module.__dict__["formula"] = formula
            replace_forward(module, (meta if weight.is_meta else real).__get__(module))
            fused += 1
    return fused


def _norm(norm: Any, hidden: Tensor) -> Tensor:
    from rlhf_kernels.norms_triton import RMSNorm

    return RMSNorm.apply(hidden, norm.weight, *norm.formula)


def _meta_norm(norm: Any, hidden: Tensor) -> Tensor:
    return MetaNorm.apply(hidden, norm.weight)
