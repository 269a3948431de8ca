"""Compiles the kernel of rotary embeddings for a GPU that need not be here: `compile_rotary.py
CAPABILITY`. A process of its own: where tests run without a device, Triton interprets."""

import sys

import torch
from compile_attention import Compiled
from triton.backends.compiler import GPUTarget

from rlhf_kernels import rotary_triton
from rlhf_kernels.rotary import Formula


def main() -> None:
    rotary_triton._rotate = Compiled(rotary_triton._rotate, GPUTarget("cuda", int(sys.argv[1]), 32))
    for formula, heads, channels, width in (
        (Formula(64, neighbours=False, shared=False), 16, 256, 64),
        (Formula(64, neighbours=False, shared=True), 64, 64, 32),
        (Formula(80, neighbours=True, shared=True), 12, 96, 80),
    ):
        query, key = (
            torch.empty(1, 200, number, channels, dtype=torch.bfloat16, device="meta")
            for number in (heads, 2)
        )
        leaves = [one.transpose(1, 2).requires_grad_() for one in (query, key)]
        numbers = torch.empty(2, 1, 200, width, dtype=torch.bfloat16, device="meta")
        rotated = rotary_triton.Rotate.apply(*leaves, *numbers, *formula)
        torch.autograd.grad(rotated, leaves, [torch.empty_like(one) for one in rotated])


if __name__ == "__main__":
    main()
