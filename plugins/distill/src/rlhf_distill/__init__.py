"""Teachers of a trained model, and divergences from them.

It is a library and no plugin: the distribution of a trainer depends on it. Records are imported
before torch, so a record must not import this package.
"""

from rlhf_distill.distillation import Mixture, beside, distil, divergence
from rlhf_distill.distributions import Measure, Teacher, TopTeacher, WholeTeacher
from rlhf_distill.measures import SkewedKL
from rlhf_distill.teachers import load_teacher

__all__ = [
    "Measure", "Mixture", "SkewedKL", "Teacher", "TopTeacher", "WholeTeacher", "beside", "distil",
    "divergence", "load_teacher",
]  # fmt: skip
