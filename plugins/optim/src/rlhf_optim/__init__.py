"""Optimizers for backends, in plain torch.

It is a library and no plugin: a backend's distribution depends on it.
"""

from rlhf_optim.first_moment import RULES, FirstMomentOptimizer, move
from rlhf_optim.newton_schulz import orthogonal
from rlhf_optim.rounding import CHUNK, RoundedAdamW

__all__ = ["CHUNK", "RULES", "FirstMomentOptimizer", "RoundedAdamW", "move", "orthogonal"]
