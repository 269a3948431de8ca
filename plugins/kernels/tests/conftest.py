"""On a machine without a CUDA device, Triton's interpreter runs the kernels."""

import os

import torch

if not torch.cuda.is_available():
    # Before anything imports Triton: its interpreter then runs kernels on the host.
    os.environ["TRITON_INTERPRET"] = "1"
