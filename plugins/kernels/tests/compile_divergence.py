"""Compiles the kernel of divergences for a GPU that need not be here: `compile_divergence.py
CAPABILITY MEASURE ...`. A process of its own: where tests run without a device, Triton interprets.
"""

import sys

import torch
from compile_attention import Compiled
from test_divergence_triton import MEASURES
from triton.backends.compiler import GPUTarget

from rlhf_kernels import divergence_triton

ROWS, VOCABULARY = 256, 32_000


def main() -> None:
    target = GPUTarget("cuda", int(sys.argv[1]), 32)
    divergence_triton._compare = Compiled(divergence_triton._compare, target)
    logits = torch.empty(ROWS, VOCABULARY, dtype=torch.bfloat16, device="meta")
    targets = torch.empty(ROWS, dtype=torch.int64, device="meta")
    weights = torch.empty(ROWS, device="meta")
    for measure in (MEASURES[name] for name in sys.argv[2:]):
        for temperature, nll, softcaps in ((1.0, 0.0, (None, None)), (2.0, 0.1, (4.0, None))):
            divergence_triton.compare_rows(
                logits, logits, targets, weights, measure, temperature=temperature, nll=nll,
                scales=(1.0, 2.0), softcaps=softcaps, with_gradient=True,
            )  # fmt: skip


if __name__ == "__main__":
    main()
