"""A reward model and its server, which the tests share."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from served import TOKEN, Served, serving, train


@pytest.fixture(autouse=True)
def _own_cache(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Tokenised rows of tests stay out of the user's cache, and are shared between tests."""
    cache = tmp_path_factory.getbasetemp() / "rlhf-cache"
    monkeypatch.setenv("RLHF_CACHE", str(cache))


@pytest.fixture(scope="session")
def rewards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run of a reward model."""
    return train("rm", "preference", tmp_path_factory.mktemp("rm"))


@pytest.fixture(scope="session")
def server(rewards: Path) -> Iterator[Served]:
    """A server of the reward model."""
    with serving(rewards, "--token", TOKEN, "--max-tokens", "256") as served:
        yield served
