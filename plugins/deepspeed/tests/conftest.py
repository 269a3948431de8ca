"""Two ranks, one and three, shared by all tests of the session."""

import os

import torch

from rlhf_devkit.ranks import port_fixture, ranks_fixture

if not torch.cuda.is_available():
    # Before anything imports Triton: its interpreter then runs kernels on the host.
    os.environ["TRITON_INTERPRET"] = "1"

pair = ranks_fixture(2)
single = ranks_fixture(1)
three = ranks_fixture(3)
port = port_fixture()
