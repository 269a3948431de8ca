"""Writing to disk: a refusal of the system is one line; a folder is complete or absent."""

import errno
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import SafetensorError

from rlhf.errors import RLHFError
from rlhf.folder.disk import new_folder, write_file, write_speed, write_whole, writing


def write_text() -> None:
    with Path("/dev/full").open("w") as file:
        file.write("text")


def write_tensor() -> None:
    torch.save(torch.zeros(100_000), "/dev/full")


def write_as_safetensors_does() -> None:
    raise RuntimeError("Error while serializing: I/O error: No space left on device (os error 28)")


@pytest.mark.parametrize("write", [write_text, write_tensor, write_as_safetensors_does])
def test_a_full_disk_is_reported_with_its_path(write, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(RLHFError) as error, writing(tmp_path):
        write()
    assert str(error.value) == (
        f"cannot write to {tmp_path}: the disk is full; free some space and start again"
    )


@pytest.mark.parametrize(
    ("number", "problem"),
    [
        (errno.EFBIG, " (File too large); choose another location"),
        (errno.EDQUOT, ": the disk is full; free some space and start again"),
        (errno.EROFS, " (Read-only file system); choose another location"),
    ],
)
def test_a_refusal_that_safetensors_reports_is_one_line(
    number: int, problem: str, tmp_path: Path
) -> None:
    with pytest.raises(RLHFError) as error, writing(tmp_path):
        raise SafetensorError(f"Error while serializing: I/O error: x (os error {number})")
    assert str(error.value) == f"cannot write to {tmp_path}{problem}"
    with pytest.raises(SafetensorError), writing(tmp_path):
        raise SafetensorError(f"Error while deserializing: I/O error: x (os error {number})")


def test_a_file_in_place_of_a_folder_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    with pytest.raises(RLHFError) as error, writing(tmp_path):
        (tmp_path / "file" / "run").mkdir()
    assert str(error.value) == (
        f"cannot write to {tmp_path}/file/run (Not a directory); choose another location"
    )


@pytest.mark.parametrize("place", ["/proc/file", "/proc/folder/file"])
def test_a_file_system_that_creates_nothing_is_named(place: str) -> None:
    target = Path(place)

    def write() -> None:
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text("text")

    with pytest.raises(RLHFError) as error, writing(target):
        write()
    created = "/".join(place.split("/")[:3])
    assert str(error.value) == (
        f"cannot write to {created} (No such file or directory); choose another location"
    )
    with pytest.raises(RLHFError, match="cannot write to /proc/"), new_folder(target):
        pass


def test_a_missing_file_that_is_read_is_not_a_refusal_to_write(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError), writing(tmp_path / "run"):
        open("")  # noqa: SIM115, PTH123


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    with pytest.raises(RLHFError) as error, writing(tmp_path):
        raise OSError(errno.EROFS, "Read-only file system", str(tmp_path / "run"))
    assert str(error.value) == (
        f"cannot write to {tmp_path}/run (Read-only file system); choose another location"
    )


@pytest.mark.parametrize(
    "said", ["unable to write to file </torch_1_2_0>", "Error creating /dev/shm/nccl-x"]
)
def test_full_shared_memory_is_not_a_full_disk(said: str, tmp_path: Path) -> None:
    with pytest.raises(RLHFError) as error, writing(tmp_path):
        raise RuntimeError(f"{said}: No space left on device (28)")
    assert str(error.value) == ("shared memory /dev/shm is full; enlarge it (docker --shm-size)")


def test_a_full_disk_elsewhere_is_named(tmp_path: Path) -> None:
    with pytest.raises(RLHFError) as error, writing(tmp_path):
        raise OSError(errno.ENOSPC, "No space left on device", "/tmp/kernels/one")
    assert str(error.value).startswith("cannot write to /tmp/kernels/one: the disk is full")


def test_an_exception_after_a_handled_refusal_is_raised_unchanged(tmp_path: Path) -> None:
    def defect() -> None:
        try:
            tmp_path.mkdir()
        except FileExistsError:
            raise KeyError("ours")  # noqa: B904  It is the context, not the cause, that is tested.

    with pytest.raises(KeyError), writing(tmp_path):
        defect()


def test_other_exceptions_are_raised_unchanged(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError), writing(tmp_path):
        raise ZeroDivisionError
    with pytest.raises(FileNotFoundError), writing(tmp_path):
        (tmp_path / "gone").read_text()


def test_a_refusal_to_read_a_file_elsewhere_is_not_a_refusal_to_write(tmp_path: Path) -> None:
    elsewhere = tmp_path / "rows.jsonl"
    with pytest.raises(PermissionError), writing(tmp_path / "run"):
        raise PermissionError(errno.EACCES, "Permission denied", str(elsewhere))
    for file in (tmp_path / "run" / "a", tmp_path, tmp_path / ".run.part" / "b", 3, None):
        with pytest.raises(RLHFError, match="cannot write to"), writing(tmp_path / "run"):
            raise PermissionError(errno.EACCES, "Permission denied", file)


def test_a_new_folder_is_complete_or_does_not_exist(tmp_path: Path) -> None:
    target = tmp_path / "deep" / "model"
    with pytest.raises(ZeroDivisionError), new_folder(target) as part:
        (part / "weights").write_text(str(1 / 0))
    assert list(target.parent.iterdir()) == []
    with new_folder(target) as part:
        (part / "weights").write_text("whole")
        assert not target.exists()
    assert [path.name for path in target.parent.iterdir()] == ["model"]
    assert (target / "weights").read_text() == "whole"


@pytest.mark.parametrize(
    ("name", "problem"), [("runs\udcff", "is not UTF-8"), ("a\0b", "contains the character NUL")]
)
def test_a_folder_whose_name_no_file_can_have_is_refused(
    name: str, problem: str, tmp_path: Path
) -> None:
    folder = tmp_path / name
    with pytest.raises(RLHFError) as error, new_folder(folder):
        pass
    assert str(error.value) == f"the path {str(folder)!a} {problem}; choose another"


def test_a_new_folder_replaces_only_an_empty_one(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    for target, message in (
        (tmp_path, f"{tmp_path} is not empty; choose a new folder"),
        (tmp_path / "file", f"{tmp_path}/file is a file; choose a new folder"),
    ):
        with pytest.raises(RLHFError) as error, new_folder(target):
            pass
        assert str(error.value) == message
    (tmp_path / "empty").mkdir()
    with new_folder(tmp_path / "empty") as part:
        (part / "weights").write_text("whole")
    assert (tmp_path / "empty" / "weights").is_file()


def test_a_folder_that_cannot_be_replaced_is_refused_before_it_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "here").mkdir()
    (tmp_path / "mounted").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "here")
    (tmp_path / "broken").symlink_to(tmp_path / "gone")
    monkeypatch.chdir(tmp_path / "here")
    monkeypatch.setattr(Path, "is_mount", lambda path: path.name == "mounted")
    expected = {
        Path(): ". is the current folder, which cannot be replaced; choose a new folder in it",
        tmp_path / "mounted": f"{tmp_path}/mounted is a mount point, which cannot be replaced; "
        "choose a new folder in it",
        tmp_path / "link": f"{tmp_path}/link is a link; choose a new folder",
        tmp_path / "broken": f"{tmp_path}/broken is a link; choose a new folder",
        Path("/"): "/ is not empty; choose a new folder",
    }
    for target, message in expected.items():
        with pytest.raises(RLHFError) as error, new_folder(target):
            raise AssertionError("it was written")
        assert str(error.value) == message


NAME = "x" * 256
NO_PLACES = {
    "file/a": "cannot write to {}/file (File exists); choose another location",
    "file/a/b": "cannot write to {}/file/a (Not a directory); choose another location",
    "broken": "cannot write to {}/broken (No such file or directory); choose another location",
    "broken/a": "cannot write to {}/broken (File exists); choose another location",
    "loop": "cannot write to {}/loop (Too many levels of symbolic links); choose another location",
    NAME: f"cannot write to {{}}/{NAME} (File name too long); choose another location",
    f"{NAME}/a": f"cannot write to {{}}/{NAME}/a (File name too long); choose another location",
    NAME[:252]: f"cannot write to {{}}/{NAME[:252]} (File name too long); choose another location",
}
"""What a user may name that cannot be written, and the error."""


@pytest.mark.parametrize("name", NO_PLACES)
def test_a_file_or_folder_that_cannot_be_made_is_one_line(name: str, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "broken").symlink_to(tmp_path / "gone")
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    with pytest.raises(RLHFError) as error:
        write_file(tmp_path / name, "text")
    assert str(error.value) == NO_PLACES[name].format(tmp_path)
    with pytest.raises(RLHFError), new_folder(tmp_path / name) as part:
        raise AssertionError(part)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["broken", "file", "loop"]


def test_a_full_disk_leaves_the_file_that_was_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "page").write_text("old")

    def fill(path: Path, text: str, **_: Any) -> None:
        path.touch()
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "write_text", fill)
    for name in ("page", "new"):
        with pytest.raises(RLHFError) as error:
            write_file(tmp_path / name, "new", replace=True)
        assert str(error.value) == (
            f"cannot write to {tmp_path}/{name}: the disk is full; free some space and start again"
        )
    assert [path.name for path in tmp_path.iterdir()] == ["page"]
    assert (tmp_path / "page").read_text() == "old"


def test_a_link_to_a_file_remains_a_link(tmp_path: Path) -> None:
    (tmp_path / "page").write_text("old")
    (tmp_path / "link").symlink_to("page")
    write_file(tmp_path / "link", "new", replace=True)
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "page").read_text() == "new"
    with pytest.raises(RLHFError) as error:
        write_file(tmp_path / "link", "newer")
    assert str(error.value) == f"{tmp_path}/link exists; choose another file"


def test_a_device_is_written_to_and_not_replaced() -> None:
    with pytest.raises(RLHFError) as error:
        write_file(Path("/dev/full"), "text", replace=True)
    assert str(error.value) == (
        "cannot write to /dev/full: the disk is full; free some space and start again"
    )
    assert Path("/dev/full").is_char_device()


@pytest.mark.parametrize("number", [errno.ENOSYS, errno.EBUSY, errno.ESTALE, errno.EOPNOTSUPP])
def test_a_file_system_may_refuse_with_any_number(number: int, tmp_path: Path) -> None:
    for file in (tmp_path, tmp_path / "run", tmp_path / ".run.part", tmp_path / "run" / "a"):
        with pytest.raises(RLHFError) as error, writing(tmp_path / "run"):
            raise OSError(number, "no", str(file))
        named = tmp_path / "run" if file.suffix else file
        assert str(error.value) == f"cannot write to {named} (no); choose another location"
    with pytest.raises(OSError, match="no"), writing(tmp_path / "run"):
        raise OSError(number, "no", str(tmp_path / "elsewhere"))


def test_a_file_is_replaced_in_one_move(tmp_path: Path) -> None:
    write_whole(tmp_path / "config.yaml", "a: 1")
    write_whole(tmp_path / "config.yaml", "a: 2")
    assert [path.name for path in tmp_path.iterdir()] == ["config.yaml"]
    assert (tmp_path / "config.yaml").read_text() == "a: 2"


def test_the_speed_of_a_folder_that_does_not_exist_yet_is_that_of_its_disk(tmp_path: Path) -> None:
    assert write_speed(tmp_path / "runs" / "first") > 1e6
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["s3://bucket/file", "file:///tmp/file"])
def test_an_address_is_no_path(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(RLHFError, match=f"cannot write to {name.partition('://')[0]}://; choose"):
        write_file(Path(name), "text")
    with pytest.raises(RLHFError, match="cannot write to"), new_folder(Path(name)):
        pass
    assert not any(tmp_path.iterdir())
    write_file(Path("a:b"), "text")
    assert Path("a:b").read_text() == "text"
