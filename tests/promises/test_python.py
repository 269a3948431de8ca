"""`from rlhf import read_config, run, export`: runs in this process and in several, stopped,
continued and exported; and the notebook of the docs."""

import json
import os
import pickle
from pathlib import Path
from typing import Any

import pytest

import rlhf
import sft_runs
from rlhf import RLHFError, read_config, run
from rlhf.launch.calling_process import only_rank, same_environment
from rlhf.request.settings_tree import to_tree
from rlhf_devkit import Ranks, without_timings
from rlhf_devkit.forked import Forked
from sft_runs import Inputs

HERE = Path(__file__).parents[1]
NOTEBOOK = HERE.parent / "docs" / "python.ipynb"


def settings(inputs: Inputs) -> dict[str, Any]:
    """The overrides of a run in fp32 of three steps."""
    return {
        "model": {"path": str(inputs.model), "dtype": "fp32"}, "data.train": str(inputs.train),
        "data.workers": 0, "batch.size": 8, "batch.tokens": 128, "train.steps": 3,
    }  # fmt: skip


def python(inputs: Inputs, folder: Path, *words: str) -> None:
    """Run Python with these words in a process of its own."""
    env = os.environ | {"RLHF_CACHE": str(inputs.cache), "OMP_NUM_THREADS": "1"}
    process = Forked(*words, environment=env, folder=folder)
    output, errors = process.communicate()
    assert process.returncode == 0, output[-2000:] + errors[-4000:]


def session(function: str, inputs: Inputs, folder: Path, *more: Any) -> Any:
    """Return what a function of python_session.py returns."""
    arguments = json.dumps([settings(inputs), str(folder), *more])
    answer = folder / "answer.json"
    python(inputs, folder, str(HERE / "python_session.py"), function, arguments, str(answer))
    return json.loads(answer.read_text())


def test_two_runs_in_one_process_are_those_of_the_command_and_leave_nothing_behind(
    inputs: Inputs, tmp_path: Path, one: Ranks
) -> None:
    first, problem, second, checkpoint = session("twice", inputs, tmp_path)
    assert (first["folder"], first["ended"]) == (str(tmp_path / "first"), "done")
    assert first["model"] == str(tmp_path / "first" / "model")
    assert [record["step"] for record in first["metrics"]] == [1, 2, 3]
    assert without_timings(second["metrics"]) == without_timings(first["metrics"])
    words = [f"--{name}={json.dumps(value)}" for name, value in settings(inputs).items()]
    words += ["--output", str(tmp_path / "command")]
    ((_, metrics),) = one.run(sft_runs.run, words, str(inputs.cache))
    assert without_timings(metrics) == without_timings(first["metrics"])
    assert problem.startswith("step 2: the loss is")
    assert checkpoint == str(tmp_path / "second" / "checkpoints" / "step-000003")
    assert (tmp_path / "exported" / "model.safetensors").is_file()


def test_several_processes_return_the_same_and_raise_what_they_print(
    inputs: Inputs, tmp_path: Path
) -> None:
    result, problem = session("in_two_processes", inputs, tmp_path)
    assert (result["ended"], result["model"]) == ("done", "runs/sft-1/model")
    assert "\noutput: null\n" in (tmp_path / "runs" / "sft-1" / "config.yaml").read_text()
    assert [record["step"] for record in result["metrics"]] == [1, 2, 3]
    assert problem.startswith("step 2: the loss is")
    assert problem.endswith("or lower optim.lr")


@pytest.mark.parametrize("nproc", [1, pytest.param(2, marks=pytest.mark.matrix)])
def test_ctrl_c_saves_and_returns_and_the_run_continues(
    inputs: Inputs, tmp_path: Path, nproc: int
) -> None:
    stopped, continued = session("interrupted", inputs, tmp_path, nproc)
    assert (stopped["ended"], stopped["model"]) == ("signal", "None")
    assert continued["ended"] == "stop_at"
    steps = [record["step"] for record in continued["metrics"]]
    assert steps == list(range(1, len(stopped["metrics"]) + 3))


def test_mistakes_of_a_user_raise_rlhf_error() -> None:
    for overrides, message in (
        ({"optim.lrr": 1}, "optim.lrr: unknown setting; did you mean optim.lr?"),
        ({"optim": {"lr": "fast"}}, 'optim.lr: expected a number, got "fast"'),
        ({"optim.lr": object()}, "optim.lr contains a object; pass text, numbers, lists and mapp"),
        ({"data": []}, "data.train is missing; pass --data FILE_OR_HUB_NAME"),
    ):
        with pytest.raises(RLHFError) as caught:
            read_config("sft", overrides={"model": "m", **overrides})
        assert str(caught.value).startswith(message)


def test_a_configuration_is_typed_and_reads_back(tmp_path: Path) -> None:
    file = tmp_path / "recipe.yaml"
    file.write_text("model: m\ndata: rows.jsonl\noptim: {lr: 1e-5}\n")
    overrides = {"data.train": [tmp_path / "a.jsonl"], "lora.rank": 8, "sft.train_on": "everything"}
    overrides |= {"observers": {"wandb": {"project": "mine"}, "tensorboard": {}}}
    config = read_config("sft", file=file, overrides=overrides)
    assert (config.optim.lr, config.data.train[0].path) == (1e-5, str(tmp_path / "a.jsonl"))
    assert config.lora is not None
    assert (config.lora.rank, config.own.train_on) == (8, "everything")
    assert read_config("sft", overrides=to_tree(config)) == config
    assert pickle.loads(pickle.dumps(config)) == config


def test_only_one_run_at_a_time_takes_place_in_the_calling_process(tmp_path: Path) -> None:
    overrides = {"model": "m", "data": "rows.jsonl", "output": str(tmp_path / "run")}
    config = read_config("sft", overrides=overrides)
    with only_rank(), pytest.raises(RLHFError) as error:
        run(config, nproc=1)
    assert str(error.value) == (
        "another run is in progress in this process; wait for it, or run this one with nproc=2 or "
        "in another process"
    )
    assert not (tmp_path / "run").exists()
    with only_rank():
        pass


def test_the_last_of_several_runs_restores_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RLHF_BEFORE", "1")
    before = dict(os.environ)
    first, second = same_environment(), same_environment()
    first.__enter__()
    os.environ |= {"RLHF_FIRST": "1", "RLHF_BEFORE": "2"}
    second.__enter__()
    first.__exit__(None, None, None)
    assert os.environ["RLHF_FIRST"] == "1"
    second.__exit__(None, None, None)
    assert dict(os.environ) == before


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="module 'rlhf' has no attribute 'fit'"):
        rlhf.fit  # noqa: B018


@pytest.mark.matrix
def test_the_notebook_of_the_docs_runs(inputs: Inputs, tmp_path: Path) -> None:
    cells = json.loads(NOTEBOOK.read_text())["cells"]
    code = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    (tmp_path / "notebook.py").write_text("\n\n".join(code))
    python(inputs, tmp_path, "notebook.py")
