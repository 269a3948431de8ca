"""Which measures and teachers a divergence refuses."""

import pytest
import torch

from rlhf.errors import RLHFError
from rlhf.readouts import Head
from rlhf_distill import Mixture, SkewedKL, WholeTeacher
from rlhf_distill.distillation import comparison


def test_a_teacher_of_another_vocabulary_is_refused() -> None:
    head, other = (Head(weight=torch.zeros(size, 4)) for size in (5, 7))
    teacher = WholeTeacher(torch.zeros(2, 4), other)
    with pytest.raises(RLHFError, match=r"has 7 tokens but the student's has 5; load the teacher"):
        comparison(teacher, Mixture(SkewedKL(forward=1.0)), head, fused=None, compiled=None)


@pytest.mark.parametrize("skew", [-0.1, 1.0])
def test_a_skew_is_a_share_below_one(skew: float) -> None:
    with pytest.raises(ValueError, match="reverse_skew"):
        SkewedKL(reverse=1.0, reverse_skew=skew)
