"""The observer with the real library and a store in SQLite."""

import json
from base64 import b64decode
from pathlib import Path

import pytest
from mlflow import MlflowClient

from rlhf_devkit import ObserverConformance, call_hooks
from rlhf_devkit.observed import PICTURE, PICTURED
from rlhf_observer_mlflow import MlflowConfig
from rlhf_observer_mlflow.observer import Mlflow


@pytest.fixture(scope="module")
def uri(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A store for all tests: to create one takes seconds."""
    return f"sqlite:///{tmp_path_factory.mktemp('store')}/mlflow.db"


@pytest.fixture(autouse=True)
def _address(uri: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The store of the tests as everybody's, and its files in a folder of the test."""
    monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
    monkeypatch.chdir(tmp_path)


def test_a_run_is_in_the_store_and_a_resumed_one_continues_it(tmp_path: Path, uri: str) -> None:
    config = MlflowConfig(experiment="mine", uri=uri)
    call_hooks(Mlflow(config), tmp_path, range(1, 5))
    call_hooks(Mlflow(config), tmp_path, range(3, 6), error=RuntimeError("a device was lost"))
    client = MlflowClient(tracking_uri=uri)
    experiment = client.get_experiment_by_name("mine")
    assert experiment is not None
    (run,) = client.search_runs([experiment.experiment_id])
    assert (run.info.run_name, run.info.status) == (tmp_path.name, "FAILED")
    assert run.data.params["optim.lr"] == "1e-05"
    assert run.data.params["plan.policy"] == "ZeRO 2, bf16"
    assert run.data.tags["checkpoint"].endswith("step-000005")
    history = client.get_metric_history(run.info.run_id, "train/loss")
    assert sorted({(item.step, item.value) for item in history}) == [
        (step, pytest.approx(1 / step)) for step in range(1, 6)
    ]
    assert run.data.metrics["eval/loss"] == 0.5


def test_the_samples_of_an_evaluation_are_an_artifact(tmp_path: Path, uri: str) -> None:
    store = MlflowClient(tracking_uri=uri)
    store.create_experiment("shown", artifact_location=(tmp_path / "artifacts").as_uri())
    for _ in range(2):  # A resumed run writes the same file again.
        call_hooks(Mlflow(MlflowConfig(experiment="shown", uri=uri)), tmp_path, [1])
    (file,) = tmp_path.glob("artifacts/*/artifacts/samples/step-000001.json")
    assert json.loads(file.read_text()) == {
        "columns": ["step", "row", "prompt", "answer", "score"],
        "data": [
            [1, "rows.jsonl:1", "1 + 1 =", "2", 0.5],
            [1, "rows.jsonl:1", "1 + 1 =", "3\n|", -1.0],
        ],
    }


def test_images_of_samples_are_artifacts_that_the_table_names(tmp_path: Path, uri: str) -> None:
    store = MlflowClient(tracking_uri=uri)
    store.create_experiment("pictured", artifact_location=(tmp_path / "artifacts").as_uri())
    observer = Mlflow(MlflowConfig(experiment="pictured", uri=uri))
    call_hooks(observer, tmp_path, [1], samples=PICTURED)
    (file,) = tmp_path.glob("artifacts/*/artifacts/samples/step-000001.json")
    names = ["samples/step-000001/1-1.jpg", "samples/step-000001/1-2.jpg"]
    assert json.loads(file.read_text()) == {
        "columns": ["step", "row", "prompt", "answer", "images"],
        "data": [
            [1, "rows.jsonl:1", "Who?", "red", names],
            [1, "rows.jsonl:1", "Who?", "blue", names],
            [1, "rows.jsonl:2", "And?", "no", []],
        ],
    }
    for name in names:
        content = (file.parents[1] / name).read_bytes()
        assert content == b64decode(PICTURE.partition(",")[2])


class TestMlflow(ObserverConformance):
    observer = "mlflow"


def test_an_address_with_a_password_is_refused_since_the_run_folder_records_it() -> None:
    message = "contains a password, which the run folder would record; set MLFLOW_TRACKING_PASSWORD"
    with pytest.raises(ValueError, match=message):
        MlflowConfig(uri="https://me:secret@tracking.example")
    assert MlflowConfig(uri="https://tracking.example").uri == "https://tracking.example"


def test_the_remedy_names_the_server_without_its_password(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "https://me:secret@tracking.example:8443/path")
    expected = (
        "without a connection to {}, set observers.mlflow.uri to a local store, such as "
        "sqlite:///mlflow.db"
    )
    assert Mlflow(MlflowConfig()).remedy == expected.format("https://tracking.example:8443")
    config = MlflowConfig(uri="http://127.0.0.1:5000")
    assert Mlflow(config).remedy == expected.format("http://127.0.0.1:5000")
    assert Mlflow(MlflowConfig(uri="sqlite:///runs.db")).remedy == ""
