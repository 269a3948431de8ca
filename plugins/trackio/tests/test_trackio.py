"""The observer with the real library and its store on this machine."""

from pathlib import Path

import pytest

from rlhf_devkit import ObserverConformance, call_hooks


@pytest.fixture
def store(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """An empty store, which Trackio chooses when it is imported."""
    folder = tmp_path_factory.mktemp("trackio")
    monkeypatch.setenv("TRACKIO_DIR", str(folder))
    from trackio import sqlite_storage, utils

    for module in (utils, sqlite_storage):
        monkeypatch.setattr(module, "TRACKIO_DIR", folder)


@pytest.mark.usefixtures("store")
def test_a_run_is_in_the_store_and_a_resumed_one_continues_it(tmp_path: Path) -> None:
    from trackio import SQLiteStorage

    from rlhf_observer_trackio import TrackioConfig
    from rlhf_observer_trackio.observer import Trackio

    config = TrackioConfig(project="mine")
    call_hooks(Trackio(config), tmp_path, range(1, 5))
    call_hooks(Trackio(config), tmp_path, range(3, 6), error=RuntimeError("a device was lost"))
    name = f"{tmp_path.name}-id-of-{tmp_path.name}"
    assert SQLiteStorage.get_runs("mine") == [name]
    rows = SQLiteStorage.get_logs("mine", name)
    losses = {row["step"]: row["train/loss"] for row in rows if "train/loss" in row}
    assert losses == {step: pytest.approx(1 / step) for step in range(1, 6)}
    assert [row["eval/loss"] for row in rows if "eval/loss" in row] == [0.5, 0.5]
    names = [row["checkpoint"] for row in rows if "checkpoint" in row]
    assert names == ["step-000004", "step-000005"]
    settings = SQLiteStorage.get_run_config("mine", name)
    assert (settings["optim.lr"], settings["plan"]["policy"]["stage"]) == (1e-5, 2)
    tables = [row["samples"]["_value"] for row in rows if "samples" in row]
    assert len(tables) == 2
    assert [row["answer"] for row in tables[0]] == ["2", "3\n|"]
    (alert,) = SQLiteStorage.get_alerts("mine")
    assert (alert["title"], alert["text"]) == ("failed", "a device was lost")


@pytest.mark.usefixtures("store")
def test_samples_have_a_cell_with_their_images(tmp_path: Path) -> None:
    from trackio import SQLiteStorage

    from rlhf_devkit.observed import PICTURED
    from rlhf_observer_trackio import TrackioConfig
    from rlhf_observer_trackio.observer import Trackio

    call_hooks(Trackio(TrackioConfig(project="mine")), tmp_path, [1], samples=PICTURED)
    rows = SQLiteStorage.get_logs("mine", f"{tmp_path.name}-id-of-{tmp_path.name}")
    (table,) = [row["samples"]["_value"] for row in rows if "samples" in row]
    kinds = [[image["_type"] for image in row["images"]] for row in table]
    assert kinds == [["trackio.image"] * 2, ["trackio.image"] * 2, []]


@pytest.mark.usefixtures("store")
def test_the_remedy_names_the_space_or_the_server_without_its_token(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from rlhf_observer_trackio import TrackioConfig
    from rlhf_observer_trackio.observer import Trackio

    assert Trackio(TrackioConfig()).remedy == ""
    expected = "without a connection to {}, remove {} to log to this machine"
    monkeypatch.setenv("TRACKIO_SERVER_URL", "https://tracks.example:7860/?write_token=secret")
    server = expected.format("tracks.example:7860", "TRACKIO_SERVER_URL")
    assert Trackio(TrackioConfig()).remedy == server
    monkeypatch.setenv("TRACKIO_SPACE_ID", "me/tracks")
    space = expected.format("the Space me/tracks", "TRACKIO_SPACE_ID")
    assert Trackio(TrackioConfig()).remedy == space
    other = expected.format("the Space me/other", "observers.trackio.space")
    assert Trackio(TrackioConfig(space="me/other")).remedy == other


@pytest.mark.usefixtures("store")
class TestTrackio(ObserverConformance):
    observer = "trackio"
