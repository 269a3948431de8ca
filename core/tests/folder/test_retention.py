"""Old checkpoints go by number and by size, and a disk without room is known before the first
step."""

import shutil
from pathlib import Path
from typing import Any

import pytest

from rlhf.config.sections import CheckpointConfig
from rlhf.errors import RLHFError
from rlhf.folder import checkpoints as checkpoint
from rlhf.folder import retention
from rlhf.folder.checkpoints import all_checkpoints


def write(checkpoints: Path, step: int, text: str = "weights") -> Path:
    part = checkpoint.begin(checkpoints, step)
    (part / "state.bin").write_text(text)
    checkpoint.digest(part, [part / "state.bin"])
    return checkpoint.commit(checkpoints, step)


def test_rotation_keeps_the_newest_and_never_touches_foreign_folders(tmp_path: Path) -> None:
    for step in (10, 20, 30):
        write(tmp_path, step)
    (tmp_path / "best").mkdir()
    (tmp_path / "step-7-notes").mkdir()
    retention.rotate(tmp_path, keep=2)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "best",
        "step-000020",
        "step-000030",
        "step-7-notes",
    ]


def test_rotation_by_size_removes_the_oldest_and_keeps_the_newest_and_the_best(
    tmp_path: Path,
) -> None:
    for step in (10, 20, 30, 40):
        folder = write(tmp_path, step, text="x" * 10_000)
    size = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
    retention.rotate(tmp_path, keep=9, max_gb=3.5 * size / 10**9)
    assert [path.name for path in all_checkpoints(tmp_path)] == [
        "step-000020",
        "step-000030",
        "step-000040",
    ]
    retention.rotate(tmp_path, keep=9, spare=20, max_gb=2.5 * size / 10**9)
    assert [path.name for path in all_checkpoints(tmp_path)] == [
        "step-000020",
        "step-000040",
    ]
    retention.rotate(tmp_path, keep=9, max_gb=0.5 * size / 10**9)
    assert [path.name for path in all_checkpoints(tmp_path)] == ["step-000040"]


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """A disk with 5 GB free."""
    usage = shutil.disk_usage(".")._replace(free=5 * 10**9)
    monkeypatch.setattr(retention.shutil, "disk_usage", lambda path: usage)


@pytest.mark.usefixtures("disk")
@pytest.mark.parametrize(
    ("size", "settings", "text"),
    [
        (
            6 * 10**9,
            {},
            "{} is on a disk with 5 GB free, but a checkpoint takes 6 GB; free some space or "
            "choose another --output",
        ),
        (
            3 * 10**9,
            {"max_gb": 2.0},
            "checkpoint.max_gb is 2 but a checkpoint takes 3 GB; raise it, or set it to null",
        ),
        (
            3 * 10**9,
            {"max_gb": 4.0, "best": "eval/loss"},
            "checkpoint.max_gb is 4 but the newest and the best take 6 GB; raise it, or set it "
            "to null",
        ),
    ],
)
def test_no_room_for_a_checkpoint_is_an_error(
    tmp_path: Path, size: int, settings: dict[str, Any], text: str
) -> None:
    with pytest.raises(RLHFError) as error:
        retention.check_room(tmp_path, size, CheckpointConfig(**settings))
    assert str(error.value) == text.format(tmp_path)


@pytest.mark.usefixtures("disk")
def test_what_a_killed_save_left_takes_no_room(tmp_path: Path) -> None:
    left = tmp_path / "checkpoints" / ".step-000002.part"
    left.mkdir(parents=True)
    retention.check_room(tmp_path, 10**9, CheckpointConfig(keep=4))
    assert not left.exists()


@pytest.mark.usefixtures("disk")
def test_little_room_is_a_warning_and_enough_is_none(tmp_path: Path) -> None:
    assert retention.check_room(tmp_path, 10**9, CheckpointConfig(keep=4)) == ""
    assert retention.check_room(tmp_path, 2 * 10**9, CheckpointConfig(keep=4)) == (
        "warning    the disk has room for 2 checkpoints of 2 GB, but those that are kept and a new "
        "one take 10 GB"
    )
    assert retention.check_room(tmp_path, 2 * 10**9, CheckpointConfig(keep=4, max_gb=3.0)) == ""


@pytest.mark.parametrize("name", ["checkpoints", "checkpoints/step-000003"])
def test_a_file_where_a_checkpoint_would_be_is_known_before_the_first_step(
    name: str, tmp_path: Path
) -> None:
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).touch()
    with pytest.raises(RLHFError) as caught:
        retention.check_room(tmp_path, 0, CheckpointConfig())
    assert str(caught.value) == (
        f"{tmp_path / name} is a file, not a folder; remove it or choose another --output"
    )


def test_files_of_the_user_beside_the_checkpoints_are_allowed(tmp_path: Path) -> None:
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "checkpoints" / "step-3.txt").touch()
    assert retention.check_room(tmp_path, 0, CheckpointConfig()) == ""
