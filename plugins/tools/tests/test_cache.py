"""`rlhf cache` lists what runs keep for later ones, and removes what none has used."""

import json
import os
import time
from pathlib import Path

import pytest
from filelock import FileLock

from rlhf.cli import main

DAY = 86400
FILES = {
    "examples/0a/examples.arrow": (3_000_000, 40),
    "examples/0a/report.json": (12, 40),
    "examples/1b/examples.arrow": (500, 2),
    "reference/weights/tokens/000000-1.npy": (2_000, 50),
    "kernels/aa/kernel.so": (1_000_000_000, 1),
}
"""Sizes, and days since each was used."""


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    root = tmp_path / "cache"
    for name, (size, days) in FILES.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("wb") as file:
            file.truncate(size)
        os.utime(path, (time.time() - days * DAY, time.time() - 100 * DAY))
    (root / "examples/0a.lock").touch()
    monkeypatch.setenv("RLHF_CACHE", str(root))
    return root


def test_the_longest_unused_is_listed_first(
    cache: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["cache"]) == 0
    assert capsys.readouterr().out == (
        "folder             size    last used\n"
        "reference/weights  2 kB    50 days ago\n"
        "examples/0a        3 MB    40 days ago\n"
        "examples/1b        500 B   2 days ago\n"
        "kernels            1.0 GB  1 day ago\n"
        f"{cache}: 4 folders, 1.0 GB\n"
    )
    assert main(["cache", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["entries"][0] == {"name": "reference/weights", "bytes": 2000, "days": 50.0}


def test_what_no_run_has_used_is_removed(cache: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["cache", "--prune", "30"]) == 0
    assert capsys.readouterr().out == f"removed 2 folders of {cache}, 3 MB\n"
    left = sorted(path.relative_to(cache).as_posix() for path in cache.glob("*/*"))
    assert left == ["examples/1b", "kernels/aa"]


def test_what_a_run_is_writing_stays(cache: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with FileLock(cache / "examples/0a.lock"):
        assert main(["cache", "--prune", "30"]) == 0
    assert capsys.readouterr().out == f"removed 1 folder of {cache}, 2 kB\n"
    assert (cache / "examples/0a/examples.arrow").exists()


def test_without_a_cache_there_is_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("RLHF_CACHE", str(tmp_path / "none"))
    assert main(["cache"]) == 0
    assert capsys.readouterr().out.endswith(f"{tmp_path / 'none'}: 0 folders, 0 B\n")


@pytest.mark.parametrize("days", ["-1", "0", "soon"])
def test_days_are_a_positive_number(days: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["cache", "--prune", days]) == 2
    assert f"expected a number above 0, got '{days}'" in capsys.readouterr().err
