"""All observers at once in a real run that is stopped and resumed, and how a configuration names
them."""

import os
import socket
from pathlib import Path
from typing import Any

import pytest

import sft_runs
from rlhf.commands.config import describe
from rlhf.errors import RLHFError
from rlhf.hookspecs import RunRecord
from rlhf.registry import observers as limits
from rlhf.registry.gateway import load_hooks
from rlhf.request.reader import read_config
from rlhf_devkit import Ranks, without_timings
from sft_runs import Inputs

SECRET = "f" * 40
NAMES = "[wandb, mlflow, tensorboard]"


def observed(words: list[str], cache: str, folder: str) -> Any:
    """Run, stop and resume with observers; returns the metrics, and what trackers hold. Trackio has
    its own tests: it keeps the folder of its first import in a process."""
    before = dict(os.environ)
    os.environ |= {
        "WANDB_MODE": "offline", "WANDB_SILENT": "true", "WANDB_API_KEY": SECRET,
        "MLFLOW_TRACKING_URI": f"sqlite:///{folder}/mlflow.db", "MLFLOW_TRACKING_PASSWORD": SECRET,
    }  # fmt: skip
    try:
        sft_runs.run([*words, "--train.stop_at", "2"], cache)
        import wandb
        from mlflow import MlflowClient

        _, metrics = sft_runs.run([*words, "--resume"], cache)
        wandb.teardown()
        client = MlflowClient()
        (experiment,) = (it for it in client.search_experiments() if it.name == "rlhf")
        runs = client.search_runs([experiment.experiment_id])
        history = client.get_metric_history(runs[0].info.run_id, "train/loss")
    finally:
        os.environ.clear()
        os.environ.update(before)
    return (
        metrics,
        len(runs),
        runs[0].data.params["optim.lr"],
        sorted({(it.step, it.value) for it in history}),
    )


def test_observers_continue_a_resumed_run_and_change_nothing(
    inputs: Inputs, tmp_path: Path, one: Ranks
) -> None:
    words = ["--train.steps", "4", "--optim.lr", "1e-3"]
    plain = sft_runs.words(inputs, tmp_path / "plain", *words)
    ((_, alone),) = one.run(sft_runs.run, plain, str(inputs.cache))
    watched = sft_runs.words(inputs, tmp_path / "run", *words, "--observers", NAMES)
    (answer,) = one.run(observed, watched, str(inputs.cache), str(tmp_path))
    metrics, num_mlflow, rate, mlflow = answer
    assert without_timings(metrics)[-1] == without_timings(alone)[-1]
    losses = [(record["step"], record["loss"]) for record in alone if "loss" in record]
    assert (num_mlflow, rate) == (1, "0.001")
    assert mlflow == losses
    assert not (tmp_path / "run" / "errors").exists()
    (first, *more) = (tmp_path / "run" / "wandb").glob("offline-run-*/run-*.wandb")
    assert [path.name for path in more] == [first.name]
    assert (tmp_path / "run" / "tensorboard").is_dir()
    files = [path for path in (tmp_path / "run").rglob("*") if path.is_file()]
    assert not [path for path in files if SECRET.encode() in path.read_bytes()]


def test_a_server_that_does_not_answer_is_named_and_does_not_hold_the_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    for limit in ("LIMIT", "LAST"):
        monkeypatch.setattr(limits, limit, 0.5)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"http://127.0.0.1:{silent.getsockname()[1]}"
        words = ["--observers.mlflow.uri", address]
        config = read_config("sft", overrides=words, inputs=False).config
        _, observers = load_hooks(config)
        run = RunRecord(name="sft", folder=tmp_path, config=config, steps=4, id="one")
        observers.on_start(run=run)
        observers.on_step(run=run, step=1, metrics={"loss": 1.0})
        observers.on_finish(run=run, error=None)
    late, lost = capsys.readouterr().err.splitlines()
    remedy = f"without a connection to {address}, set observers.mlflow.uri to a local store"
    assert late.startswith("warning: observer 'mlflow' has not returned from on_start for ")
    assert remedy in late
    assert "the run ends without it, and 3 calls did not get through; " + remedy in lost
    assert "observer.py" in (tmp_path / "errors" / "observer-mlflow.txt").read_text()


@pytest.mark.parametrize(
    ("yaml", "words", "expected"),
    [
        ("[wandb]", [], {"wandb": "rlhf"}),
        ("wandb", ["--observers.wandb.project", "b"], {"wandb": "b"}),
        ("{wandb: {project: a}}", ["--observers", "[mlflow, wandb]"], {"mlflow": "", "wandb": "a"}),
        ("{wandb: {project: a}, mlflow: }", ["--observers", "[]"], {}),
        ("{wandb: a}", ["--observers.wandb.mode", "offline"], {"wandb": "a"}),
        ("[mlflow]", ["--observers", "{wandb: {project: b}}"], {"mlflow": "", "wandb": "b"}),
        ("null", ["--observers", "wandb"], {"wandb": "rlhf"}),
    ],
)
def test_a_list_chooses_observers_and_a_mapping_adds_settings(
    tmp_path: Path, yaml: str, words: list[str], expected: dict[str, str]
) -> None:
    file = tmp_path / "recipe.yaml"
    file.write_text(f"observers: {yaml}\n")
    request = read_config("sft", overrides=[str(file), *words], inputs=False)
    sections = request.config.observers.by_name
    assert {name: getattr(it, "project", "") for name, it in sections.items()} == expected
    file.write_text(describe(request))
    again = read_config("sft", overrides=[str(file)], inputs=False)
    assert again.config.observers == request.config.observers


def test_settings_of_observers_are_checked() -> None:
    for word, message in (
        ("--observers.wandb.projct=a", "observers.wandb.projct: unknown setting; did you mean "
         "observers.wandb.project?"),
        ("--observers.wandb.mode=ofline", "observers.wandb.mode: expected one of online, offline, "
         'got "ofline"; did you mean offline?'),
        ("--observers.tensorboard.x=1", "observers.tensorboard.x: unknown setting; "
         "available: none"),
        ("--observers=[wandbb]", "observer 'wandbb' is not installed (did you mean 'wandb'?); "),
        ("--observers.mlflow.uri=https://a:b@c", "observers.mlflow.uri: contains a password, which "
         "the run folder would record; set MLFLOW_TRACKING_PASSWORD, or the whole address as "
         "MLFLOW_TRACKING_URI"),
    ):  # fmt: skip
        with pytest.raises(RLHFError) as caught:
            read_config("sft", overrides=[word], inputs=False)
        assert str(caught.value).startswith(message)
