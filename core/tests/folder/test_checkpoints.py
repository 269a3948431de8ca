"""A checkpoint is complete or absent, and the newest is found by looking."""

import itertools
import json
from pathlib import Path

import pytest

from rlhf.errors import RLHFError
from rlhf.folder import checkpoints as checkpoint
from rlhf.folder import retention


def write(checkpoints: Path, step: int, text: str = "weights") -> Path:
    part = checkpoint.begin(checkpoints, step)
    (part / "policy").mkdir()
    file = part / "policy" / "state.bin"
    file.write_text(text)
    checkpoint.digest(part, [file])
    return checkpoint.commit(checkpoints, step)


def test_a_committed_checkpoint_is_whole(tmp_path: Path) -> None:
    folder = write(tmp_path, 20)
    assert folder.name == "step-000020"
    assert checkpoint.damage(folder) is None
    assert json.loads((folder / "manifest.json").read_text())["files"].keys() == {
        "policy/state.bin"
    }


def test_the_newest_is_the_highest_step_not_the_last_in_the_alphabet(tmp_path: Path) -> None:
    write(tmp_path, 999_999)
    newest = write(tmp_path, 1_000_000)
    assert checkpoint.find(tmp_path) == newest


def test_a_half_written_checkpoint_is_not_a_checkpoint(tmp_path: Path) -> None:
    older = write(tmp_path, 10)
    part = checkpoint.begin(tmp_path, 20)
    (part / "state.bin").write_text("half")
    assert checkpoint.find(tmp_path) == older


def test_without_any_checkpoint_there_is_none(tmp_path: Path) -> None:
    assert checkpoint.find(tmp_path / "nowhere") is None


def test_the_manifest_has_the_files_of_every_rank(tmp_path: Path) -> None:
    part = checkpoint.begin(tmp_path, 1)
    for rank in range(2):
        file = part / f"{rank}.bin"
        file.write_text(str(rank))
        assert not checkpoint.digested(part, ranks=2)
        checkpoint.digest(part, [file], rank=rank)
    assert checkpoint.digested(part, ranks=2)
    folder = checkpoint.commit(tmp_path, 1, ranks=2)
    assert {path.name for path in folder.iterdir()} == {"0.bin", "1.bin", "manifest.json"}
    assert set(json.loads((folder / "manifest.json").read_text())["files"]) == {"0.bin", "1.bin"}


def test_files_of_a_rank_that_are_not_seen_are_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    part = checkpoint.begin(tmp_path, 1)
    checkpoint.digest(part, [])
    monkeypatch.setattr(checkpoint, "VISIBLE", 0.0)
    with pytest.raises(RLHFError) as error:
        checkpoint.commit(tmp_path, 1, ranks=2)
    assert str(error.value) == (
        f"{part} does not have the files of all ranks; choose an --output that is the same folder "
        "on all hosts"
    )


def test_a_checkpoint_in_another_format_is_refused(tmp_path: Path) -> None:
    folder = write(tmp_path, 10)
    manifest = folder / "manifest.json"
    content = json.loads(manifest.read_text())
    del content["format"]
    manifest.write_text(json.dumps(content))
    for find in (checkpoint.find, lambda path: checkpoint.find(path, "step-10")):
        with pytest.raises(RLHFError) as error:
            find(tmp_path)
        assert str(error.value) == (
            f"{folder} has the format of another version of rlhf; export its weights with the "
            "version that wrote it (rlhf export) and start from them"
        )


@pytest.mark.parametrize(
    ("harm", "message"),
    [
        (lambda file: file.write_text("weightz"), "has changed since it was written"),
        (lambda file: file.write_text("weigh"), "has 5 bytes instead of 7"),
        (lambda file: file.unlink(), "is missing"),
    ],
)
def test_a_damaged_newest_is_named_with_the_one_before(tmp_path: Path, harm, message: str) -> None:  # type: ignore[no-untyped-def]
    write(tmp_path, 10)
    newest = write(tmp_path, 20)
    file = newest / "policy" / "state.bin"
    harm(file)
    with pytest.raises(RLHFError) as error:
        checkpoint.find(tmp_path)
    assert str(error.value) == (
        f"the newest checkpoint is damaged: {file} {message}; "
        "continue from the previous one with --resume step-000010"
    )


def test_the_previous_checkpoint_is_used_if_it_is_named(tmp_path: Path) -> None:
    older = write(tmp_path, 10)
    (write(tmp_path, 20) / "manifest.json").unlink()
    assert checkpoint.find(tmp_path, "step-000010") == older


def test_a_damaged_only_checkpoint_says_to_start_again(tmp_path: Path) -> None:
    folder = write(tmp_path, 10)
    (folder / "manifest.json").unlink()
    with pytest.raises(RLHFError) as error:
        checkpoint.find(tmp_path)
    assert str(error.value) == (
        f"the newest checkpoint is damaged: {folder} has no manifest.json; "
        "no older one is intact; start again with --overwrite"
    )


def test_an_unknown_name_lists_the_available_ones(tmp_path: Path) -> None:
    write(tmp_path, 10)
    with pytest.raises(RLHFError) as error:
        checkpoint.find(tmp_path, "step-000030")
    assert str(error.value) == (
        f"no checkpoint 'step-000030' in {tmp_path}; available: step-000010"
    )


def test_a_name_is_a_number_with_or_without_its_zeros(tmp_path: Path) -> None:
    folder = write(tmp_path, 10)
    assert checkpoint.find(tmp_path, "step-10") == folder
    assert checkpoint.find(tmp_path, "step-000010") == folder


@pytest.mark.parametrize(
    "text",
    ["{}", "[]", "3", '{"files": 3}', '{"fil', '{"files": {"a": {"size": 1e400}}}', "[" * 99_999],
    ids=range(7),
)
def test_a_manifest_of_any_other_shape_is_damage(tmp_path: Path, text: str) -> None:
    folder = write(tmp_path, 10)
    (folder / "manifest.json").write_text(text)
    assert checkpoint.damage(folder) == f"{folder}/manifest.json cannot be read"


def test_any_flipped_bit_of_a_checkpoint_is_damage_or_changes_nothing_of_it(tmp_path: Path) -> None:
    folder = write(tmp_path, 10)
    for file in (folder / "policy" / "state.bin", folder / "manifest.json"):
        content = file.read_bytes()
        files = json.loads((folder / "manifest.json").read_text())["files"]
        for place, bit in itertools.product(range(len(content)), range(8)):
            changed = bytearray(content)
            changed[place] ^= 1 << bit
            file.write_bytes(changed)
            problem = checkpoint.damage(folder)
            if problem is None:
                assert json.loads((folder / "manifest.json").read_text())["files"] == files
        file.write_bytes(content)
        assert checkpoint.damage(folder) is None


def test_a_replaced_checkpoint_exists_at_every_moment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path, 10, "first")
    rename = Path.rename

    def killed(self: Path, target: Path) -> Path:
        if self.name.endswith(".part"):
            raise KeyboardInterrupt
        return rename(self, target)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", killed)
        with pytest.raises(KeyboardInterrupt):
            write(tmp_path, 10, "second")
    for found in (checkpoint.find(tmp_path), checkpoint.find(tmp_path, "step-10")):
        assert found is not None
        assert checkpoint.damage(found) is None
        assert (found / "policy" / "state.bin").read_text() == "first"
        assert checkpoint.name_of(found) == "step-000010"
    third = write(tmp_path, 10, "third")
    assert checkpoint.find(tmp_path) == third
    assert [path.name for path in tmp_path.iterdir()] == ["step-000010"]


def test_a_folder_replaced_before_a_kill_is_deleted_at_the_next_rotation(tmp_path: Path) -> None:
    left = write(tmp_path, 10).rename(tmp_path / ".step-000010.replaced")
    write(tmp_path, 20)
    retention.rotate(tmp_path, keep=2)
    assert left.is_dir(), "it is the only checkpoint of its step"
    left.rename(tmp_path / "step-000010")
    write(tmp_path, 10).rename(left)
    newest = write(tmp_path, 10)
    left.mkdir()
    retention.rotate(tmp_path, keep=2)
    assert not left.exists()
    assert newest.is_dir()


def test_checkpoints_after_the_resumed_one_are_hidden_and_then_deleted(
    tmp_path: Path,
) -> None:
    for step in (10, 20, 30):
        write(tmp_path, step)
    assert checkpoint.set_aside(tmp_path, after=10) == ["step-000020", "step-000030"]
    assert checkpoint.find(tmp_path) == tmp_path / "step-000010"
    assert (tmp_path / ".step-000030.aside" / "policy" / "state.bin").read_text() == "weights"
    assert checkpoint.set_aside(tmp_path, after=10) == []
    write(tmp_path, 12)
    retention.rotate(tmp_path, keep=2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-000010", "step-000012"]


def test_a_half_removed_folder_is_not_a_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path, 10)
    newest = write(tmp_path, 20)

    def killed(folder: Path, **options: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(retention.shutil, "rmtree", killed)
        with pytest.raises(KeyboardInterrupt):
            retention.rotate(tmp_path, keep=1)
    assert checkpoint.damage(tmp_path / "step-000010") is not None
    assert checkpoint.find(tmp_path) == newest


def test_leftovers_of_killed_saves_are_deleted_by_the_next_save(tmp_path: Path) -> None:
    checkpoint.begin(tmp_path, 10)
    part = checkpoint.begin(tmp_path, 20)
    assert list(tmp_path.iterdir()) == [part]
