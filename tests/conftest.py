"""Fixtures of the tests that concern more than one distribution."""

import os
from pathlib import Path

import pytest

import sft_runs
from rlhf_devkit.ranks import ranks_fixture
from sft_runs import Inputs

one = ranks_fixture(1)
two = ranks_fixture(2)


@pytest.fixture(scope="session")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Inputs:
    """A tiny model folder and two files of rows, made once."""
    return sft_runs.make(tmp_path_factory.mktemp("inputs"))


@pytest.fixture(autouse=True)
def _own_cache(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Tokenised rows of tests stay out of the user's cache, and are shared between tests."""
    cache = tmp_path_factory.getbasetemp() / "rlhf-cache"
    monkeypatch.setenv("RLHF_CACHE", str(cache))


DATA = Path(os.environ.get("RLHF_REAL_DATA", Path(__file__).parents[2] / "shared" / "data"))
"""Rows and a small pretrained model from elsewhere, which are no part of this repository."""


@pytest.fixture(scope="session")
def real_data() -> Path:
    """The folder of real rows, where there is one."""
    if not DATA.is_dir():
        pytest.skip("no folder of real rows here")
    return DATA
