"""Compiles the kernels of convolutions for a GPU that need not be here: `compile_convolution.py
CAPABILITY`. A process of its own: where tests run without a device, Triton interprets."""

import sys

import torch
from compile_attention import Compiled
from triton.backends.compiler import GPUTarget

from rlhf_kernels import convolution_triton


def main() -> None:
    target = GPUTarget("cuda", int(sys.argv[1]), 32)
    for name in ("_forward", "_backward", "_scatter"):
        kernel = Compiled(getattr(convolution_triton, name), target)
        setattr(convolution_triton, name, kernel)
    for channels, width, activation in ((6144, 4, "silu"), (100, 3, None)):
        hidden, weight, bias = (
            torch.empty(shape, dtype=torch.bfloat16, device="meta", requires_grad=True)
            for shape in ((1, channels, 200), (channels, width), channels)
        )
        convolution_triton.convolve(hidden, weight, bias, activation).sum().backward()


if __name__ == "__main__":
    main()
