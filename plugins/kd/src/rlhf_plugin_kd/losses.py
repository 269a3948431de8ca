"""How far a student's distribution q is from its teacher's p: five divergences with their
derivatives.

Each takes log q and log p [n, M] and gives the divergence [n] and its derivative by log q [n, M],
every log q_v taken as free: d/d(log q_v) = q_v * d/d(q_v). Core takes it on through the softmax.
All is computed from logarithms, so that a probability of zero is not a special case.
"""

import math
from functools import partial

import torch
from torch import Tensor

from rlhf.readouts import Measure


def measure(loss: str, *, beta: float, skew: float) -> Measure:
    """Return the divergence by its name in the configuration."""
    measures: dict[str, Measure] = {
        "forward_kl": forward_kl,
        "reverse_kl": reverse_kl,
        "jsd": partial(jsd, beta=beta),
        "skewed_forward_kl": partial(skewed_forward_kl, skew=skew),
        "skewed_reverse_kl": partial(skewed_reverse_kl, skew=skew),
    }
    return measures[loss]


def forward_kl(student: Tensor, teacher: Tensor) -> tuple[Tensor, Tensor]:
    """KL(p || q) = sum p log(p / q): the student covers all that the teacher does (Hinton et al.,
    arXiv 1503.02531, up to the teacher's entropy). Derivative: -p."""
    p = teacher.exp()
    return (p * (teacher - student)).sum(-1), -p


def reverse_kl(student: Tensor, teacher: Tensor) -> tuple[Tensor, Tensor]:
    """KL(q || p) = sum q log(q / p): the student seeks the teacher's modes (MiniLLM, arXiv
    2306.08543, here per token). Derivative: q (log(q / p) + 1)."""
    q = student.exp()
    ratio = student - teacher
    return (q * ratio).sum(-1), q * (ratio + 1)


def jsd(student: Tensor, teacher: Tensor, *, beta: float) -> tuple[Tensor, Tensor]:
    """beta KL(p || m) + (1 - beta) KL(q || m) with m = beta p + (1 - beta) q (GKD, arXiv
    2306.13649, equation 1). Divided by beta it goes to KL(p || q) as beta goes to 0, divided by
    1 - beta to KL(q || p) as beta goes to 1. Derivative: (1 - beta) q log(q / m), in which the
    terms of p through m have cancelled."""
    p, q = teacher.exp(), student.exp()
    middle = mixed(teacher, student, beta)
    ratio = student - middle
    value = beta * (p * (teacher - middle)).sum(-1) + (1 - beta) * (q * ratio).sum(-1)
    return value, (1 - beta) * q * ratio


def skewed_forward_kl(student: Tensor, teacher: Tensor, *, skew: float) -> tuple[Tensor, Tensor]:
    """KL(p || m) with m = skew p + (1 - skew) q (DistiLLM, arXiv 2402.03898; its authors' code
    leaves the teacher's entropy out, which has no gradient). Derivative: -(1 - skew) p q / m."""
    middle = mixed(teacher, student, skew)
    value = (teacher.exp() * (teacher - middle)).sum(-1)
    return value, (teacher + student - middle).exp_().mul_(skew - 1)


def skewed_reverse_kl(student: Tensor, teacher: Tensor, *, skew: float) -> tuple[Tensor, Tensor]:
    """KL(q || m) with m = (1 - skew) p + skew q (DistiLLM, arXiv 2402.03898).
    Derivative: q (log(q / m) + 1 - skew q / m)."""
    q = student.exp()
    ratio = student - mixed(student, teacher, skew)
    return (q * ratio).sum(-1), q * (ratio + 1 - skew * ratio.exp())


def mixed(one: Tensor, other: Tensor, share: float) -> Tensor:
    """Return log(share * exp(one) + (1 - share) * exp(other)), for a share above 0 and below 1."""
    return torch.logaddexp(one + math.log(share), other + math.log1p(-share))
