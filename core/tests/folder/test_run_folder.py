"""The run folder: chosen, locked, cut back, and never overwritten by accident."""

import errno
import importlib
import json
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from rlhf.config.sections import Config
from rlhf.errors import RLHFError
from rlhf.folder.run_folder import RunFolder, check_resumable, choose, chosen, logged
from rlhf.request.reader import Request, read_config
from rlhf.request.settings_tree import to_tree


def request(output: Path | None, *, resume: str | None = None, overwrite: bool = False) -> Any:
    config = Config(output=None if output is None else str(output))
    return SimpleNamespace(name="sft", config=config, resume=resume, overwrite=overwrite)


def with_run(folder: Path) -> Path:
    folder.mkdir()
    (folder / "config.yaml").write_text("{}")
    return folder


def test_without_output_the_first_free_number_is_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs" / "sft-1").mkdir(parents=True)
    assert choose(request(None)) == Path("runs/sft-2")
    assert choose(request(None)) == Path("runs/sft-3")


def test_a_new_folder_that_a_failed_run_leaves_empty_is_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)

    def fail(*, write: bool) -> None:
        with chosen(request(None)) as folder:
            assert folder.is_dir()
            if write:
                (folder / "notes").touch()
            raise ZeroDivisionError

    for write in (False, True):
        with pytest.raises(ZeroDivisionError):
            fail(write=write)
        assert Path("runs/sft-1").exists() == write


def test_a_new_folder_that_a_stopped_run_leaves_empty_is_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    # The launcher returns normally when a signal has ended the ranks.
    with chosen(request(None)) as folder:
        assert folder.is_dir()
    assert not folder.exists()


def test_a_new_folder_that_cannot_be_created_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("runs").write_text("mine")
    with pytest.raises(RLHFError) as error:
        choose(request(None))
    assert str(error.value) == (
        "cannot write to runs/sft-1 (Not a directory); choose another location"
    )
    Path("runs").unlink()
    Path("runs").symlink_to("a disk that is not mounted")
    with pytest.raises(RLHFError) as error:
        choose(request(None))
    assert str(error.value) == "cannot write to runs (Not a directory); choose another location"


def test_an_output_that_the_system_refuses_is_one_line(tmp_path: Path) -> None:
    folder = tmp_path / ("x" * 256)
    with pytest.raises(RLHFError) as error:
        choose(request(folder))
    assert str(error.value).startswith(f"cannot write to {folder}/")
    assert str(error.value).endswith(" (File name too long); choose another location")
    with pytest.raises(RLHFError) as error:
        RunFolder(Path("/proc"), fresh=True)
    assert str(error.value) == (
        "cannot lock /proc ([Errno 2] No such file or directory: '/proc/.lock'); choose an "
        "--output on a file system with locks"
    )


def test_a_folder_with_a_run_needs_resume_or_overwrite(tmp_path: Path) -> None:
    folder = with_run(tmp_path / "run")
    with pytest.raises(RLHFError) as error:
        choose(request(folder))
    assert str(error.value) == (
        f"{folder} already contains a run; continue it with --resume, replace it with "
        "--overwrite, or choose another --output"
    )
    assert choose(request(folder, resume="")) == folder
    assert choose(request(folder, overwrite=True)) == folder


def test_resume_without_output_says_what_is_missing() -> None:
    with pytest.raises(RLHFError) as error:
        choose(request(None, resume=""))
    assert str(error.value) == "--resume needs the run folder; pass --output"


def test_an_output_that_is_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "notes").write_text("mine")
    with pytest.raises(RLHFError) as error:
        choose(request(tmp_path / "notes"))
    assert str(error.value) == f"output {tmp_path / 'notes'} is a file; choose a folder"


def test_an_output_inside_another_run_is_refused(tmp_path: Path) -> None:
    folder = with_run(tmp_path / "run")
    for name in ("model", "checkpoints"):
        with pytest.raises(RLHFError) as error:
            choose(request(folder / name))
        assert str(error.value) == (
            f"output {folder / name} belongs to the run in {folder}; choose another"
        )


def test_checkpoints_without_their_config_are_a_run_that_nothing_overwrites(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    (folder / "checkpoints" / "step-000001").mkdir(parents=True)
    with pytest.raises(RLHFError, match=" already contains a run; continue it with --resume"):
        choose(request(folder))
    for text in (None, ""):
        if text is not None:
            (folder / "config.yaml").write_text(text)
        with pytest.raises(RLHFError) as error:
            check_resumable(request(folder, resume=""), folder)
        assert str(error.value) == (
            f"{folder} contains checkpoints, but its config.yaml is missing or empty; restore "
            "it, or start again with --overwrite"
        )


def test_a_config_that_cannot_be_read_stops_a_resume(tmp_path: Path) -> None:
    folder = with_run(tmp_path / "run")
    for text, message in (
        ("[unclosed", "line 1: expected ',' or ']', but got '<stream end>'"),
        ("[a]", "contains a list; expected sections such as `optim: {lr: 1e-5}`"),
    ):
        (folder / "config.yaml").write_text(text)
        with pytest.raises(RLHFError) as error:
            check_resumable(request(folder, resume=""), folder)
        assert str(error.value) == f"{folder}/config.yaml {message}"


def resumed(folder: Path, *words: str) -> Request:
    """A request to resume a run folder that was begun without `words`."""
    given = ["--model", "m", "--data", "d.jsonl", "--output", str(folder)]
    if not folder.exists():
        with_run(folder)
        begun = to_tree(read_config("sft", overrides=[*given, "--model.fp8", "tensorwise"]).config)
        (folder / "config.yaml").write_text(yaml.safe_dump(begun))
    return read_config("sft", overrides=[*given, "--resume", *words])


def test_auto_does_not_raise_the_budget_with_fp8(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    fp8 = ["--model.fp8", "tensorwise"]
    assert check_resumable(resumed(folder, *fp8, "--data.workers", "3"), folder) is None
    with pytest.raises(RLHFError) as error:
        check_resumable(resumed(folder, *fp8, "--batch.tokens", "4096"), folder)
    assert str(error.value) == (
        f"{folder} cannot be resumed with another configuration: batch.tokens: auto -> "
        "4096; restore these values, or choose another --output"
    )


@pytest.mark.parametrize(
    ("data", "change"),
    [
        ("e.jsonl", "data.train.0.path: d.jsonl -> e.jsonl"),
        ("[{path: d.jsonl, limit: 5}]", "data.train.0.limit: null -> 5"),
        (
            "[d.jsonl, {path: e.jsonl, weight: 2}]",
            "data.train.1: null -> {path: e.jsonl, weight: 2.0}",
        ),
    ],
)
def test_other_data_are_named_by_what_is_different(tmp_path: Path, data: str, change: str) -> None:
    folder = tmp_path / "run"
    with pytest.raises(RLHFError) as error:
        check_resumable(resumed(folder, "--model.fp8", "tensorwise", "--data.train", data), folder)
    assert str(error.value) == (
        f"{folder} cannot be resumed with another configuration: {change}; restore these values, "
        "or choose another --output"
    )


def test_a_run_of_a_release_with_fewer_settings_resumes(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    request = resumed(folder, "--model.fp8", "tensorwise")
    begun = yaml.safe_load((folder / "config.yaml").read_text())
    del begun["optim"]["states"], begun["sft"], begun["train"]["patience"]
    (folder / "config.yaml").write_text(yaml.safe_dump(begun))
    assert check_resumable(request, folder) is None


PLUGINS = """
from attrs import frozen
from rlhf.plugin import BackendPlugin, ExtensionPlugin, TrainerPlugin

@frozen(kw_only=True)
class BareConfig:
    shard: bool = False

@frozen(kw_only=True)
class GrownConfig:
    power: float = 1.0
    scale: float = 2.0

@frozen(kw_only=True)
class SlowConfig:
    seconds: float = 1.0

slow = ExtensionPlugin(config=SlowConfig, hooks="no.such:Slow")
bare = BackendPlugin(config=BareConfig, hooks="rlhf_devkit.plain:PlainBackend")
grown = TrainerPlugin(config=GrownConfig, trainer="no.such:Trainer")
"""


@pytest.fixture
def _plugins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A distribution with a backend and a trainer of which both have settings."""
    info = tmp_path / "site" / "folder_plugins-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.4\nName: folder-plugins\nVersion: 1.0\n")
    entries = "[rlhf.backends]\nbare = folder_plugins:bare\n"
    entries += "[rlhf.trainers]\ngrown = folder_plugins:grown\n"
    entries += "[rlhf.extensions]\nslow = folder_plugins:slow\n"
    (info / "entry_points.txt").write_text(entries)
    (info.parent / "folder_plugins.py").write_text(PLUGINS)
    monkeypatch.syspath_prepend(str(info.parent))
    importlib.invalidate_caches()
    yield
    sys.modules.pop("folder_plugins", None)


def begun(folder: Path, *words: str, trainer: str = "sft") -> Callable[..., Request]:
    """Write the configuration of a run; returns what reads the request that resumes it."""
    given = ["--model", "m", "--data", "d.jsonl", "--output", str(folder)]
    tree = to_tree(read_config(trainer, overrides=[*given, *words]).config)
    with_run(folder)
    (folder / "config.yaml").write_text(yaml.safe_dump(tree))
    return lambda *more: read_config(trainer, overrides=[*given, "--resume", *more])


def change(folder: Path, **sections: dict[str, Any]) -> None:
    """Replace sections in the configuration of a run."""
    tree = yaml.safe_load((folder / "config.yaml").read_text())
    (folder / "config.yaml").write_text(yaml.safe_dump(tree | sections))


@pytest.mark.usefixtures("_plugins")
@pytest.mark.parametrize("before", ["bare", "bare --bare.shard true", "deepspeed"])
@pytest.mark.parametrize(
    "after", ["bare", "bare --bare.shard true", "deepspeed --deepspeed.stage 1"]
)
def test_a_resumed_run_may_have_another_backend(before: str, after: str, tmp_path: Path) -> None:
    resume = begun(tmp_path / "run", "--backend", *before.split())
    # A run of an earlier version did not record this setting.
    tree = yaml.safe_load((tmp_path / "run" / "config.yaml").read_text())
    del tree["optim"]["states"]
    change(tmp_path / "run", optim=tree["optim"])
    assert check_resumable(resume("--backend", *after.split()), tmp_path / "run") is None


@pytest.mark.usefixtures("_plugins")
def test_a_resumed_run_may_have_a_backend_that_has_lost_a_setting(tmp_path: Path) -> None:
    resume = begun(tmp_path / "run", "--backend", "bare")
    change(tmp_path / "run", bare={"shard": True, "lost": 1})
    for backend in ("bare", "deepspeed"):
        assert check_resumable(resume("--backend", backend), tmp_path / "run") is None


@pytest.mark.usefixtures("_plugins")
def test_another_extension_is_refused_and_another_observer_is_not(tmp_path: Path) -> None:
    resume = begun(tmp_path / "run", "--backend", "bare", "--observers", "[tensorboard]")
    change(tmp_path / "run", observers={"uninstalled": {"steps": 3}, "tensorboard": {"lost": 1}})
    for observers in ("[]", "[tensorboard]", "[trackio]"):
        request = resume("--backend", "bare", "--observers", observers)
        assert check_resumable(request, tmp_path / "run") is None
    with pytest.raises(RLHFError) as error:
        check_resumable(resume("--backend", "bare", "--extensions", "slow"), tmp_path / "run")
    assert str(error.value) == (
        f"{tmp_path}/run cannot be resumed with another configuration: extensions: [] -> [slow]; "
        "restore these values, or choose another --output"
    )


@pytest.mark.usefixtures("_plugins")
def test_a_resumed_run_keeps_the_settings_of_its_extensions(tmp_path: Path) -> None:
    backend, words = ("--backend", "bare"), ("--extensions.slow.seconds", "2")
    resume = begun(tmp_path / "run", *backend, *words)
    assert check_resumable(resume(*backend, *words), tmp_path / "run") is None
    with pytest.raises(RLHFError) as error:
        check_resumable(resume(*backend, "--extensions", "[slow]"), tmp_path / "run")
    assert "another configuration: extensions.slow.seconds: 2.0 -> 1.0; " in str(error.value)
    # As a run of an earlier version has recorded it.
    change(tmp_path / "run", extensions=["slow"])
    assert check_resumable(resume(*backend, "--extensions", "slow"), tmp_path / "run") is None


@pytest.mark.usefixtures("_plugins")
def test_a_resumed_run_may_have_a_trainer_with_another_setting_but_not_one_less(
    tmp_path: Path,
) -> None:
    resume = begun(tmp_path / "run", "--backend", "bare", trainer="grown")
    change(tmp_path / "run", grown={"power": 1.0})
    assert check_resumable(resume("--backend", "deepspeed"), tmp_path / "run") is None
    with pytest.raises(RLHFError) as error:
        check_resumable(resume("--backend", "bare", "--grown.scale", "3"), tmp_path / "run")
    assert str(error.value) == (
        f"{tmp_path}/run cannot be resumed with another configuration: grown.scale: 2.0 -> 3.0; "
        "restore these values, or choose another --output"
    )
    change(tmp_path / "run", grown={"power": 1.0, "smoothing": 0.5})
    with pytest.raises(RLHFError) as error:
        check_resumable(resume("--backend", "deepspeed"), tmp_path / "run")
    assert str(error.value) == (
        f"{tmp_path}/run cannot be resumed, since its config.yaml is not valid now: "
        "grown.smoothing: unknown setting; available: power, scale; install the versions of rlhf "
        "and of its plugins that wrote it, or choose another --output"
    )


@pytest.mark.usefixtures("_plugins")
def test_a_run_of_another_trainer_is_refused_by_name(tmp_path: Path) -> None:
    begun(tmp_path / "run", "--backend", "bare", trainer="grown")
    given = ["--model", "m", "--data", "d.jsonl", "--output", str(tmp_path / "run")]
    request = read_config("sft", overrides=[*given, "--backend", "deepspeed", "--resume"])
    with pytest.raises(RLHFError) as error:
        check_resumable(request, tmp_path / "run")
    assert str(error.value) == (
        f"{tmp_path}/run is a run of grown, not of sft; resume it with its own trainer, or choose "
        "another --output"
    )


def test_a_checkpoint_that_is_named_must_exist(tmp_path: Path) -> None:
    assert check_resumable(request(tmp_path, resume=""), tmp_path) is None
    with pytest.raises(RLHFError) as error:
        check_resumable(request(tmp_path, resume="step-3"), tmp_path)
    assert str(error.value) == (
        f"no checkpoint 'step-3' in {tmp_path}/checkpoints; available: none"
    )


def test_a_run_folder_that_cannot_be_created_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    with pytest.raises(RLHFError) as error:
        RunFolder(tmp_path / "file" / "run", fresh=True)
    assert str(error.value) == (
        f"cannot write to {tmp_path}/file/run (Not a directory); choose another location"
    )


def test_two_runs_cannot_write_to_one_folder(tmp_path: Path) -> None:
    first = RunFolder(tmp_path, fresh=True)
    with pytest.raises(RLHFError) as error:
        RunFolder(tmp_path, fresh=True)
    assert str(error.value) == (
        f"another run is writing to {tmp_path}; wait for it or choose another --output"
    )
    first.close()
    RunFolder(tmp_path, fresh=True).close()


def test_overwriting_removes_only_the_files_of_the_run(tmp_path: Path) -> None:
    (tmp_path / "checkpoints" / "step-000001").mkdir(parents=True)
    (tmp_path / "metrics.jsonl").write_text("{}")
    (tmp_path / "notes.txt").write_text("mine")
    with RunFolder(tmp_path, fresh=True) as folder:
        folder.once_begun(lambda: folder.write_summary(id="new"))
        assert sorted(path.name for path in tmp_path.iterdir()) == [
            ".lock",
            "checkpoints",
            "metrics.jsonl",
            "notes.txt",
        ]
        folder.begin()
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        ".lock",
        "notes.txt",
        "summary.json",
    ]


def test_metrics_are_cut_to_the_checkpoint_and_a_torn_line_is_removed(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path, fresh=True)
    for step in (1, 2, 3):
        folder.append("metrics.jsonl", {"step": step, "loss": 1.0})
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 1, "lo')
    rollouts = tmp_path / "rollouts"
    rollouts.mkdir()
    for name in ("1", "3", "eval-2", "eval-3", "3-copy"):
        (rollouts / f"{name}.arrow").touch()
    folder.cut(2, evaluated=True)
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [1, 2]
    assert sorted(path.stem for path in rollouts.iterdir()) == ["1", "3-copy", "eval-2"]
    folder.close()


@pytest.mark.parametrize(
    "tail",
    [
        b'{"step": 3, "lo', bytes(4096), b"\xff\xfe\n", b"[1]\n", b'{"loss": 1.0}\n', b"[" * 99_999,
        b'{"step": "2"}\n', b'{"step": null}\n', b'{"step": 1e400}\n', b'{"step": -1}\n',
    ],
    ids=range(10),
)  # fmt: skip
def test_a_resumed_run_appends_whole_lines_after_damaged_ones(tmp_path: Path, tail: bytes) -> None:
    folder = RunFolder(tmp_path, fresh=True)
    for name in ("metrics.jsonl", "samples.jsonl"):
        folder.append(name, {"step": 1, "loss": 1.0})
        with (tmp_path / name).open("ab") as file:
            file.write(tail)
    folder.cut(2, evaluated=False)
    for name in ("metrics.jsonl", "samples.jsonl"):
        folder.append(name, {"step": 2, "loss": 0.5})
        lines = (tmp_path / name).read_text().splitlines()
        assert [json.loads(line) for line in lines] == logged(tmp_path, name=name)
        assert [line["step"] for line in logged(tmp_path, name=name)] == [1, 2]
    folder.close()


@pytest.mark.parametrize("text", ["", "{", "[1]", "null", '{"id": 5}', '{"id": ""}', "[" * 99_999])
def test_a_run_without_a_readable_id_gets_a_new_one(tmp_path: Path, text: str) -> None:
    (tmp_path / "summary.json").write_text(text)
    with RunFolder(tmp_path, fresh=False) as folder:
        assert re.fullmatch("[0-9a-f]{12}", folder.identity())
        folder.write_summary(ended="done")
    assert json.loads((tmp_path / "summary.json").read_text())["ended"] == "done"


def test_an_evaluation_that_is_made_again_is_cut_from_the_metrics(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path, fresh=True)
    for record in ({"loss": 1.0}, {"eval/loss": 2.0}):
        for step in (1, 2):
            folder.append("metrics.jsonl", {"step": step, **record})
    folder.cut(2, evaluated=False)
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert [list(json.loads(line).items())[:2] for line in lines] == [
        [("step", 1), ("loss", 1.0)],
        [("step", 2), ("loss", 1.0)],
        [("step", 1), ("eval/loss", 2.0)],
    ]
    folder.close()


def test_versions_hold_no_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    folder = RunFolder(tmp_path, fresh=True)
    folder.write_versions(trainer="sft", trust_remote_code=False)
    written = (tmp_path / "versions.json").read_text()
    assert "hf_secret" not in written
    assert json.loads(written)["torch"]
    folder.close()


def test_a_file_system_without_locks_is_one_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(self: object, **options: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr("rlhf.folder.run_folder.FileLock.acquire", refused)
    with pytest.raises(RLHFError) as caught:
        RunFolder(tmp_path / "run", fresh=True)
    assert str(caught.value) == (
        f"cannot lock {tmp_path}/run ([Errno {errno.ENOLCK}] No locks available); choose an "
        "--output on a file system with locks"
    )
