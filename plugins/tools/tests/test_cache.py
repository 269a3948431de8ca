"""`rlhf cache` lists what runs keep for later ones, and removes what none has used."""

import json
import os
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from filelock import FileLock

from rlhf.cli import main
from rlhf_tools import cache as command
from rlhf_tools.cache import Entry, size_of

DAY = 86400
OLD, NEW, WEIGHTS = "0" * 32, "1b" * 16, f"{'2c' * 16}-first100"
FILES = {
    f"examples/{OLD}/examples.arrow": (3_000_000, 40),
    f"examples/{OLD}/report.json": (12, 45),
    f"examples/{NEW}/examples.arrow": (500, 1.5),
    f"reference/{WEIGHTS}/tokens/000000-1.npy": (2_000, 50),
    # Others' files, of which the cache knows nothing.
    f"examples/{OLD}-host@part/examples.arrow": (1, 90),
    "kernels/aa/kernel.so": (1_000, 90),
    "runs/sft-1/model/model.safetensors": (1_000, 90),
    ".git/objects/0a/1b": (1_000, 90),
}
"""Sizes, and days since each was used."""


def make(root: Path) -> Path:
    for name, (size, days) in FILES.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("wb") as file:
            file.truncate(size)
        os.utime(path, (time.time() - days * DAY, time.time() - 100 * DAY))
    (root / f"examples/{OLD}.lock").touch()
    return root


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("RLHF_CACHE", str(tmp_path / "cache"))
    return make(tmp_path / "cache")


def left_in(root: Path) -> set[str]:
    return {name for name in FILES if (root / name).exists()}


def test_the_longest_unused_is_listed_first(
    cache: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["cache"]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert lines == [
        ["folder", "size", "last", "used"],
        [f"reference/{WEIGHTS}", "2", "kB", "50", "days", "ago"],
        [f"examples/{OLD}", "3", "MB", "40", "days", "ago"],
        [f"examples/{NEW}", "500", "B", "1", "day", "ago"],
        [f"{cache}:", "3", "folders,", "3", "MB"],
    ]
    assert main(["cache", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["entries"][0] == {"name": f"reference/{WEIGHTS}", "bytes": 2000, "days": 50.0}


def test_what_no_run_has_used_is_removed_and_nothing_else(
    cache: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["cache", "--prune", "30"]) == 0
    assert capsys.readouterr().out == f"removed 2 folders of {cache}, 3 MB\n"
    gone = {name for name in FILES if f"{OLD}/" in name or WEIGHTS in name}
    assert left_in(cache) == FILES.keys() - gone
    assert sorted(path.name for path in (cache / "examples").iterdir()) == [
        f"{OLD}-host@part", f"{OLD}.lock", NEW,
    ]  # fmt: skip


def test_what_a_run_is_writing_stays(cache: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with FileLock(cache / f"examples/{OLD}.lock"):
        assert main(["cache", "--prune", "30"]) == 0
    assert capsys.readouterr().out == (
        f"kept examples/{OLD}, which a run is writing\nremoved 1 folder of {cache}, 2 kB\n"
    )
    assert (cache / f"examples/{OLD}/examples.arrow").exists()


def test_what_a_run_has_begun_to_read_stays(
    cache: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    listed = command.entries_of

    def entries_of(root: Path) -> Iterator[Entry]:
        yield from [*listed(root)]
        for path in (root / f"examples/{OLD}").iterdir():
            os.utime(path)

    monkeypatch.setattr(command, "entries_of", entries_of)
    assert main(["cache", "--prune", "30"]) == 0
    assert (cache / f"examples/{OLD}/examples.arrow").exists()
    assert "removed 1 folder" in capsys.readouterr().out


def test_one_that_cannot_be_removed_does_not_stop_the_others(
    cache: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    own = command.remove

    def remove(folder: Path) -> None:
        if folder.name == WEIGHTS:
            raise PermissionError(13, "Permission denied")
        own(folder)

    monkeypatch.setattr(command, "remove", remove)
    assert main(["cache", "--prune", "30"]) == 2
    printed = capsys.readouterr()
    assert printed.out == f"removed 1 folder of {cache}, 3 MB\n"
    assert printed.err == f"cannot remove {cache / 'reference' / WEIGHTS}: Permission denied\n"


def test_files_may_vanish_while_they_are_listed(
    cache: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    own = os.walk

    def walk(folder: Path) -> Iterator[Any]:
        found = [*own(folder)]
        shutil.rmtree(folder, ignore_errors=True)
        yield from found

    monkeypatch.setattr(os, "walk", walk)
    assert main(["cache"]) == 0
    assert capsys.readouterr().out.endswith(f"{cache}: 3 folders, 0 B\n")


def test_a_link_to_a_folder_of_the_cache_is_followed(
    cache: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (cache / "examples").rename(tmp_path / "elsewhere")
    (cache / "examples").symlink_to(tmp_path / "elsewhere")
    assert main(["cache", "--prune", "30"]) == 0
    assert capsys.readouterr().out == f"removed 2 folders of {cache}, 3 MB\n"
    assert not (tmp_path / "elsewhere" / OLD).exists()


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


def test_a_list_as_json_removes_nothing(cache: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["cache", "--prune", "30", "--json"]) == 2
    assert "not allowed with argument" in capsys.readouterr().err
    assert left_in(cache) == FILES.keys()


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (999_600, "1 MB"),
        (12_345_678, "12.3 MB"),
        (1.5e12, "1,500.0 GB"),
    ],
)
def test_sizes_have_three_digits(size: int, text: str) -> None:
    assert size_of([Entry(Path(), "", size, 0.0)]) == text
