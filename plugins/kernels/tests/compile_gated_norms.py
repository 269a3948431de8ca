"""Compiles the kernels of gated norms for a GPU that need not be here: `compile_gated_norms.py
CAPABILITY`. A process of its own: where tests run without a device, Triton interprets.
"""

import sys

import torch
from compile_attention import Compiled
from triton.backends.compiler import GPUTarget

from rlhf_kernels import gated_norms_triton
from rlhf_kernels.gated_norms_triton import GatedRMSNorm

ROWS = 256
KINDS = (
    (128, 1, False, False, False),  # Gated DeltaNet
    (128, 1, True, False, True),  # KDA
    (8192, 1, False, True, False),  # Mamba 2
    (3072, 2, False, True, True),
)
"""Width, groups, and whether the gate is a sigmoid, comes first, and only the result is rounded."""


def main() -> None:
    target = GPUTarget("cuda", int(sys.argv[1]), 32)
    for name in ("_forward", "_backward"):
        setattr(gated_norms_triton, name, Compiled(getattr(gated_norms_triton, name), target))
    for width, groups, *booleans in KINDS:
        rows = torch.empty(ROWS, width, dtype=torch.bfloat16, device="meta", requires_grad=True)
        weight = torch.empty(width, dtype=torch.bfloat16, device="meta", requires_grad=True)
        gate = torch.empty_like(rows, requires_grad=True)
        output = GatedRMSNorm.apply(rows, gate, weight, 1e-6, groups, *booleans)
        output.sum().backward()


if __name__ == "__main__":
    main()
