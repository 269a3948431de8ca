"""Kernels in Triton run on the host where there is no CUDA."""

import os

import torch

if not torch.cuda.is_available():
    # Before anything imports Triton.
    os.environ["TRITON_INTERPRET"] = "1"
