"""A server of the run that dies is started again, and its answers are drawn again."""

import gc
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from attrs import frozen
from fake_venv import make_environment
from fake_vllm import GENERATE

import rlhf_demo
from rlhf.errors import RLHFError
from rlhf_devkit import shared, tiny
from rlhf_devkit.curves import same_curve, without_timings
from rlhf_rollout_vllm import client

TESTS = Path(__file__).parent


@frozen
class Inputs:
    """Words of a run of the tiny model whose server dies as a file says."""

    words: list[str]
    deaths: Path
    cache: str

    def run(self, output: Path, *more: str, deaths: str = "") -> tiny.Metrics:
        self.deaths.write_text(deaths)
        return tiny.run("grpo", [*self.words, "--output", str(output), *more], self.cache, True)


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Inputs:
    folder = tmp_path_factory.mktemp("restarts")
    train = rlhf_demo.rows("arithmetic", "train", "prompt")
    model = tiny.make_model(folder / "model", ends_answers=True)
    (folder / "rewards.py").write_text(
        "def short(completions, completion_ids, **columns):\n"
        "    return [-float(len(ids)) for ids in completion_ids]\n"
    )
    path = os.pathsep.join([str(TESTS / "fake_environment"), str(TESTS), *filter(None, sys.path)])
    deaths = folder / "deaths"
    environment = {"PYTHONPATH": path, "SEEN": str(folder / "seen"), "DEATHS": str(deaths)}
    listed = ", ".join(f"{name}: {value}" for name, value in environment.items())
    words = [
        "--model", str(model), "--model.dtype", "fp32", "--data.workers", "0",
        "--data.train", str(tiny.write_rows(folder / "train.jsonl", train[:8])),
        "--batch.size", "4", "--batch.tokens", "2048", "--data.max_tokens", "64",
        "--checkpoint.every", "null", "--optim.lr", "3e-3", "--train.steps", "3",
        "--grpo.max_new_tokens", "6", "--grpo.answers", "4", "--grpo.truncated", "count",
        "--grpo.rewards", f"{folder / 'rewards.py'}:short", "--rollouts.engine", "vllm",
        "--rollouts.vllm.folder", str(folder), "--rollouts.vllm.bucket_gb", "2e-5",
        "--rollouts.vllm.python",
        make_environment(folder / "env", version=None, packages=()),
        "--rollouts.vllm.environment", f"{{{listed}}}",
    ]  # fmt: skip
    return Inputs(words, deaths, str(folder / "cache"))


@pytest.fixture(scope="module")
def undisturbed(inputs: Inputs, tmp_path_factory: pytest.TempPathFactory) -> tiny.Metrics:
    """The curve of a run whose server lives."""
    return without_timings(inputs.run(tmp_path_factory.mktemp("undisturbed") / "run"))


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(client, "PAUSES", (0.01, 0.2))
    yield
    gc.collect()  # The engine of a run holds its server.


def problem(act: Callable[[], Any]) -> str:
    with pytest.raises(RLHFError) as error:
        act()
    return str(error.value)


DRAWING, SENDING = f"{GENERATE} 29\n", "/update_weights 4\n"
"""Deaths in the second rollout, after eight texts of canaries and 16 answers of the first, and
while weights are sent."""


def test_a_server_that_dies_while_it_writes_is_started_again_and_the_curve_is_the_same(
    inputs: Inputs, tmp_path: Path, undisturbed: tiny.Metrics, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "run"
    curve = inputs.run(output, deaths=DRAWING)
    assert inputs.deaths.read_text() == ""
    same_curve(without_timings(curve), undisturbed)
    printed = capsys.readouterr().out
    log = output / "vllm.log"
    assert (
        f"\nrollouts   the vLLM server has ended with SIGKILL; its log {log} says: loading; "
        "restart 1 of 3\n"
    ) in printed
    assert printed.count("\nrollouts   vLLM at http://127.0.0.1:") == 2
    # The answers of the new server are compared too.
    assert printed.count(" under vLLM and the trainer differ by ") == 2
    assert log.read_text() == "loading\nloading\n"
    gc.collect()
    assert not [*inputs.deaths.parent.glob("rlhf-vllm-*")]


@pytest.mark.matrix
def test_a_server_that_dies_twice_while_weights_are_sent_is_started_again(
    inputs: Inputs, tmp_path: Path, undisturbed: tiny.Metrics, capsys: pytest.CaptureFixture[str]
) -> None:
    curve = inputs.run(tmp_path / "run", deaths=f"{SENDING}{SENDING}")
    same_curve(without_timings(curve), undisturbed)
    printed = capsys.readouterr().out
    assert "; restart 1 of 3\n" in printed
    assert "; restart 2 of 3\n" in printed


@pytest.mark.matrix
def test_ranks_that_divide_weights_agree_that_their_server_has_died(
    inputs: Inputs, tmp_path: Path, undisturbed: tiny.Metrics
) -> None:
    inputs.deaths.write_text(f"{SENDING}{DRAWING}")
    words = [*inputs.words, "--output", str(tmp_path / "run"), "--deepspeed.stage", "3"]
    curve = shared(2).run(tiny.run, "grpo", words, inputs.cache, timeout=300)[0]
    assert inputs.deaths.read_text() == ""
    same_curve(without_timings(curve), undisturbed)


def test_a_server_that_dies_more_often_than_allowed_ends_the_run(
    inputs: Inputs, tmp_path: Path
) -> None:
    output = tmp_path / "run"
    text = problem(
        lambda: inputs.run(output, "--rollouts.vllm.restarts", "1", deaths=SENDING + DRAWING)
    )
    assert text == (
        f"the vLLM server has ended with SIGKILL; its log {output / 'vllm.log'} says: loading; it "
        "was started again 1 time, as rollouts.vllm.restarts allows"
    )


@pytest.mark.matrix
def test_a_server_that_dies_while_the_run_trains_ends_it_and_resume_draws_the_same_again(
    inputs: Inputs, tmp_path: Path
) -> None:
    lag = ("--rollouts.lag", "1", "--checkpoint.every", "1")
    whole = inputs.run(tmp_path / "whole", *lag)
    output = tmp_path / "run"
    # In the third drawing, after two of 16 answers and the canaries of two transfers.
    text = problem(lambda: inputs.run(output, *lag, deaths=f"{GENERATE} 43\n"))
    assert text == (
        f"the vLLM server has ended with SIGKILL; its log {output / 'vllm.log'} says: loading; the "
        "weights of its answers have been trained since (rollouts.lag), so continue from the last "
        "checkpoint with --resume"
    )
    continued = inputs.run(output, *lag, "--resume")
    same_curve(without_timings(continued), without_timings(whole))
