"""Compiles the kernels of experts for a GPU that need not be here: `compile_experts.py
CAPABILITY`. A process of its own: where tests run without a device, Triton interprets.
"""

import sys

import torch
from compile_attention import Compiled
from triton.backends.compiler import GPUTarget

from rlhf_kernels import experts_triton as kernels

KINDS = ((8, 2048, 768, False), (2, 4096, 14336, False), (4, 2880, 2880, True))
"""Choices of a token, widths of tokens and of experts, and whether the activation is GELU."""


def main() -> None:
    target = GPUTarget("cuda", int(sys.argv[1]), 32)
    for name in ("_product", "_product_gradient", "_sum_choices"):
        setattr(kernels, name, Compiled(getattr(kernels, name), target))
    for choices, width, inner, gelu in KINDS:
        rows = torch.empty(16 * choices, width, dtype=torch.bfloat16, device="meta")
        gates, weights = rows.new_empty(len(rows), 2 * inner), rows.new_empty(len(rows))
        place = torch.empty(16, choices, dtype=torch.long, device="meta")
        product = kernels.product(gates, weights, place.flatten(), gelu=gelu)
        kernels.product_gradient_(gates, weights, place.flatten(), product, gelu=gelu)
        kernels.sum_choices(rows, place)


if __name__ == "__main__":
    main()
