"""An empty cache."""

from pathlib import Path

import pytest


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache folder, which no other test uses."""
    monkeypatch.setenv("RLHF_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"
