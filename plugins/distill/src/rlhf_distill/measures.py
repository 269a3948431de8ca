"""Divergences of a student's distribution q from its teacher's p, with their derivatives."""

import math
from typing import Any

import torch
from attrs import field, frozen, validators
from torch import Tensor

from rlhf.plugin import documented

share: Any = validators.and_(validators.ge(0), validators.lt(1))


@documented
@frozen(kw_only=True)
class SkewedKL:
    """forward * KL(p || m) + reverse * KL(q || r) of a teacher's distribution p and a student's q,
    where m = forward_skew p + (1 - forward_skew) q and r = reverse_skew q + (1 - reverse_skew) p
    (DistiLLM, arXiv 2402.03898).

    A `Measure`. Its derivative by log q, each one treated as independent, is
    -forward (1 - forward_skew) p q / m + reverse q (log(q / r) + 1 - reverse_skew q / r). All is
    computed from logarithms, so that a tiny probability is not a special case.
    """

    forward: float = 0.0
    """Weight of KL(p || m)."""
    reverse: float = 0.0
    """Weight of KL(q || r)."""
    forward_skew: float = field(default=0.0, validator=share)
    """Share of p in m, below 1; with 0, m is q."""
    reverse_skew: float = field(default=0.0, validator=share)
    """Share of q in r, below 1; with 0, r is p."""

    def __call__(self, student: Tensor, teacher: Tensor) -> tuple[Tensor, Tensor]:
        """Return the divergence and its derivative; see the class."""
        value, derivative = torch.zeros_like(student[..., 0]), torch.zeros_like(student)
        if self.forward:
            p, skew = teacher.exp(), self.forward_skew
            middle = mixed(teacher, student, skew)
            value = value + self.forward * (p * (teacher - middle)).sum(-1)
            shared = (1 - skew) * (teacher + student - middle).exp() if skew else p
            derivative = derivative - self.forward * shared
        if self.reverse:
            q, skew = student.exp(), self.reverse_skew
            ratio = student - mixed(student, teacher, skew)
            value = value + self.reverse * (q * ratio).sum(-1)
            slope = ratio + 1 - skew * ratio.exp() if skew else ratio + 1
            derivative = derivative + self.reverse * q * slope
        return value, derivative


def mixed(one: Tensor, other: Tensor, share: float) -> Tensor:
    """Return log(share * exp(one) + (1 - share) * exp(other)), for a share from 0 and below 1."""
    if share == 0:
        return other
    return torch.logaddexp(one + math.log(share), other + math.log1p(-share))
