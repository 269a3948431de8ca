"""Triton's interpreter where there is no device."""

import os

import torch

if not torch.cuda.is_available():
    # Before anything imports Triton: its interpreter then runs kernels on the host.
    os.environ["TRITON_INTERPRET"] = "1"
