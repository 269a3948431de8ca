"""What the name of a model or of data stands for."""

import getpass
from pathlib import Path

import pytest

from rlhf.config.source_names import local_path


@pytest.mark.parametrize("path", ["rows.jsonl", "/data/rows.jsonl", "owner/name", "~nobody-here/x"])
def test_a_name_stays_as_it_is(path: str) -> None:
    assert local_path(path) == Path(path)


@pytest.mark.parametrize("user", ["", getpass.getuser()])
def test_a_tilde_is_a_home_folder(user: str) -> None:
    assert local_path(f"~{user}/rows.jsonl") == Path(f"~{user}").expanduser() / "rows.jsonl"
