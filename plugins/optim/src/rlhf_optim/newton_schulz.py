"""Matrices made orthogonal, as Muon does with momentum (K. Jordan et al., 2024,
https://kellerjordan.github.io/posts/muon)."""

import torch
from torch import Tensor

ITERATIONS = 5
COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""Of x, x^3 and x^5 in the polynomial that is iterated."""


def orthogonal(matrix: Tensor) -> Tensor:
    """Return matrices with singular values of about 1, by Newton-Schulz iterations."""
    is_tall = matrix.shape[-2] > matrix.shape[-1]
    stack = (matrix.mT if is_tall else matrix).reshape(-1, *sorted(matrix.shape[-2:]))
    stack = stack / torch.linalg.matrix_norm(stack, keepdim=True).clamp(min=1e-7)
    first, third, fifth = COEFFICIENTS
    for _ in range(ITERATIONS):
        square = stack @ stack.mT
        factor = torch.baddbmm(square, square, square, beta=third, alpha=fifth)
        stack = torch.baddbmm(stack, factor, stack, beta=first)
    return (stack.mT if is_tall else stack).reshape(matrix.shape)
