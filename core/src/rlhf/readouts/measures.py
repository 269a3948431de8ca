"""Divergences of a student's distribution q from its teacher's p, with their derivatives."""

import math

import torch
from attrs import frozen
from torch import Tensor

from rlhf.config.field_docs import documented


@documented
@frozen(kw_only=True)
class SkewedKL:
    """forward * KL(p || m) + reverse * KL(q || n), where m is q with a share of p in it, and n is p
    with a share of q (DistiLLM, arXiv 2402.03898).

    A `Measure` that a kernel computes on CUDA. It takes log q and log p [n, M] and returns the
    divergence [n] and its derivative by each log q, all of them taken as free [n, M]:
    -forward (1 - forward_skew) p q / m + reverse q (log(q / n) + 1 - reverse_skew q / n). All is
    computed from logarithms, so that a tiny probability is not a special case.
    """

    forward: float = 0.0
    """Weight of KL(p || m)."""
    reverse: float = 0.0
    """Weight of KL(q || n)."""
    forward_skew: float = 0.0
    """Share of p in m, below 1; with 0, m is q."""
    reverse_skew: float = 0.0
    """Share of q in n, below 1; with 0, n is p."""

    def __call__(self, student: Tensor, teacher: Tensor) -> tuple[Tensor, Tensor]:
        """Return the divergence and its derivative; see the class."""
        value, derivative = torch.zeros_like(student[..., 0]), torch.zeros_like(student)
        if self.forward:
            middle = mixed(teacher, student, self.forward_skew)
            value = value + self.forward * (teacher.exp() * (teacher - middle)).sum(-1)
            shared = (teacher + student - middle).exp()
            derivative = derivative - self.forward * (1 - self.forward_skew) * shared
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
