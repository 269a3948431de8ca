"""Kernels for rlhf: fused and compiled layers, attention over packed rows, and readouts, in Triton
and by libraries."""

from rlhf.plugin import KernelsPlugin

plugin = KernelsPlugin(kernels="rlhf_kernels.kernels:TritonKernels")
