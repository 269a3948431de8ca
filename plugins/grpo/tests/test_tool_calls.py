"""GRPO on answers with results of tools: the engine, the loss, files, replay, resume and ranks."""

from pathlib import Path
from typing import Any

import grpo_calls
import numpy as np
import pytest
from attrs import frozen
from grpo_recordings import Recording, table

import rlhf_demo
from rlhf.errors import RLHFError
from rlhf_devkit import tiny
from rlhf_devkit.curves import Metrics, same_curve, training, weights, without_timings
from rlhf_devkit.ranks import ranks_fixture

pool = ranks_fixture(2)
TOOLS = Path(__file__).with_name("grpo_tools.py")


@frozen
class Inputs:
    folder: Path

    def words(self, output: Path, *more: str) -> list[str]:
        return [
            "--model", str(self.folder / "model"), "--model.dtype", "fp32",
            "--data.train", str(self.folder / "train.jsonl"),
            "--data.eval", str(self.folder / "eval.jsonl"), "--data.workers", "0",
            "--data.chat_template", str(self.folder / "template.jinja"),
            "--batch.size", "4", "--data.max_tokens", "128", "--optim.lr", "3e-3",
            "--grpo.max_new_tokens", "40", "--grpo.answers", "3", "--grpo.truncated", "count",
            "--grpo.stop", "'[aeiou]'", "--grpo.rewards", f"{TOOLS}:digits",
            "--grpo.tools", f"{TOOLS}:add", "--output", str(output), *more,
        ]  # fmt: skip

    def run(self, output: Path, *more: str) -> Metrics:
        words = self.words(output, *more)
        cache = str(self.folder / "cache")
        return without_timings(grpo_calls.run("grpo", words, cache, True))


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Inputs:
    folder = tmp_path_factory.mktemp("tools")
    rows = rlhf_demo.rows("arithmetic", "train", "prompt")
    tiny.make_model(folder / "model", ends_answers=True)
    (folder / "template.jinja").write_text(grpo_calls.CHAT_TEMPLATE)
    tiny.write_rows(folder / "train.jsonl", rows[:8])
    tiny.write_rows(folder / "eval.jsonl", rows[8:12])
    return Inputs(folder)


STEPS = ("--train.steps", "4", "--grpo.batches", "2", "--grpo.passes", "2")


@pytest.fixture(scope="module")
def recording(inputs: Inputs) -> Recording:
    """A run that others replay."""
    folder = inputs.folder / "recorded"
    more = ("--train.eval_every", "2", "--checkpoint.every", "null")
    return Recording(folder, inputs.run(folder, *STEPS, *more))


def test_the_trainer_computes_what_was_drawn_in_every_turn(recording: Recording) -> None:
    rows = table(recording.folder / "rollouts" / "1.arrow")
    logprobs = [np.array(each) for row in rows for each in row["logprobs"]]
    turns = [int((np.diff(np.isnan(each).astype(int)) == 1).sum()) for each in logprobs]
    assert {0, 1, 2} <= {*turns}
    first = recording.metrics[0]
    # Of each own token after the results, too: a wrong position or id would show.
    assert first["sampling/sampling_logp_difference/max"] < 1e-4
    own = [int((~np.isnan(each)).sum()) for each in logprobs]
    assert first["completions/mean_length"] < 40
    assert first["completions/max_length"] <= max(own)
    assert first["tools/call_frequency"] == pytest.approx(np.mean(turns), abs=1)
    assert first["tools/failure_frequency"] == 0
    assert "<|user|>" not in "".join(text for row in rows for text in row["text"])
    # A reward sees what the tool returned, of the most two digits a call.
    assert max(max(row["reward/digits"]) for row in rows) >= 2
    assert any("eval/tools/call_frequency" in line for line in recording.metrics)


def test_a_replay_and_a_resumed_run_give_the_same_curve_to_the_last_bit(
    inputs: Inputs, recording: Recording, tmp_path: Path
) -> None:
    more = ("--train.eval_every", "2", "--rollouts.replay", str(recording.folder))
    replayed = inputs.run(tmp_path / "replay", *STEPS, *more, "--checkpoint.every", "null")
    assert replayed == recording.metrics
    assert weights(tmp_path / "replay") == weights(recording.folder)
    options = ("--train.eval_every", "2", "--checkpoint.every", "1")
    inputs.run(tmp_path / "run", *STEPS, *options, "--train.stop_at", "3")
    resumed = inputs.run(tmp_path / "run", *STEPS, *options, "--resume")
    assert training(resumed)[-1] == training(recording.metrics)[-1]
    assert weights(tmp_path / "run") == weights(recording.folder)


def test_other_results_than_those_recorded_end_a_replay(
    inputs: Inputs, recording: Recording, tmp_path: Path
) -> None:
    source = TOOLS.read_text().replace("return a + b", "return a + b + 1")
    (tmp_path / "other.py").write_text(source)
    more = ("--rollouts.replay", str(recording.folder), "--grpo.tools", f"{tmp_path}/other.py:add")
    with pytest.raises(RLHFError) as caught:
        inputs.run(tmp_path / "run", *STEPS, *more)
    text = str(caught.value)
    assert text.startswith("rollouts.replay: what tools return in the answer to '")
    assert text.endswith(
        "; replay with the same tools, whose results depend only on their arguments"
    )


@pytest.mark.matrix
def test_two_ranks_write_the_same_answers(
    inputs: Inputs, recording: Recording, tmp_path: Path, pool: Any
) -> None:
    words = inputs.words(tmp_path / "two", *STEPS, "--train.eval_every", "2")
    curves = pool.run(grpo_calls.run, "grpo", words, str(inputs.folder / "cache"))
    same_curve(recording.metrics, without_timings(curves[0]))
    for name in ("1.arrow", "eval-2.arrow"):
        mine, theirs = (
            table(folder / "rollouts" / name) for folder in (recording.folder, tmp_path / "two")
        )
        assert [row["tokens"] for row in mine] == [row["tokens"] for row in theirs]


def test_an_environment_rewards_the_answers(inputs: Inputs, tmp_path: Path) -> None:
    more = (
        "--grpo.tools",
        f"{{functions: [], environment: '{TOOLS}:Sums'}}",
        "--grpo.rewards",
        "[]",
    )
    first, second = tmp_path / "run", tmp_path / "replay"
    metrics = inputs.run(first, *more, "--train.steps", "2")
    assert metrics[0]["reward"] == pytest.approx(metrics[0]["rewards/Sums/mean"])
    assert metrics[0]["tools/call_frequency"] >= metrics[0]["reward"] > 0
    rows = table(first / "rollouts" / "1.arrow")
    assert all(" digits." in row["columns"] for row in rows)
    replayed = inputs.run(second, *more, "--train.steps", "2", "--rollouts.replay", str(first))
    assert replayed == metrics


def test_rewards_are_needed_if_the_environment_has_none(inputs: Inputs, tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(TOOLS.read_text().replace("get_reward", "_reward"))
    more = (
        "--grpo.tools",
        f"{{functions: [], environment: '{tmp_path}/own.py:Sums'}}",
        "--grpo.rewards",
        "[]",
    )
    with pytest.raises(RLHFError) as caught:
        inputs.run(tmp_path / "run", *more)
    assert str(caught.value) == (
        "grpo.rewards is empty, and Sums has no get_reward; name a rule or a function, such as "
        "exact"
    )
