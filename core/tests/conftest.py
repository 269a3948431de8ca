"""An empty cache, and fake distributions."""

import os
from pathlib import Path

import pytest
import torch

from rlhf_devkit.distributions import install, toy

__all__ = ["install", "toy"]

if not torch.cuda.is_available():
    # Before anything imports Triton: its interpreter then runs kernels on the host.
    os.environ["TRITON_INTERPRET"] = "1"


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache folder, which no other test uses."""
    monkeypatch.setenv("RLHF_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"
