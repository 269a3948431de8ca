"""What holds for every test of the workspace."""

import os
from collections.abc import Iterator

import pytest
import torch

if not torch.cuda.is_available():
    # Before anything imports Triton: its interpreter then runs kernels on the host.
    os.environ["TRITON_INTERPRET"] = "1"

RENDEZVOUS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")


@pytest.fixture(autouse=True)
def _no_rank_left_behind() -> Iterator[None]:
    """A test that makes this process look like a rank would break the runs of later tests."""
    before = {name: os.environ.get(name) for name in RENDEZVOUS}
    yield
    assert {name: os.environ.get(name) for name in RENDEZVOUS} == before
