"""On-policy training: a reward on held-out prompts chooses the best checkpoint, and a run that
stops in the middle of a rollout continues to the last bit."""

import contextlib
import io
import os
from itertools import pairwise
from pathlib import Path
from typing import Any

import attrs
import pytest
from rich.console import Console
from transformers import LlamaForCausalLM

import sft_runs
from rlhf.folder import checkpoints
from rlhf.request.reader import Request, read_config
from rlhf.train.rank import run_rank
from rlhf.train.rollout import FILE
from rlhf_devkit import column, layouts, without_timings
from rlhf_devkit.ranks import Ranks
from rlhf_tools.inspect import inspect_command
from sft_runs import Inputs

BATCHES, PASSES = 2, 2
"""Of the trainer: a rollout serves four steps of an epoch of 6 batches, which has 12 steps."""
END_SCALE = 30.0
"""The model with random weights then ends its answers at different lengths."""


@pytest.fixture(scope="module")
def ending(inputs: Inputs, tmp_path_factory: pytest.TempPathFactory) -> Inputs:
    """The inputs, with a model that writes EOS."""
    folder = tmp_path_factory.mktemp("on-policy") / "model"
    model: Any = LlamaForCausalLM.from_pretrained(inputs.model)
    model.get_input_embeddings().weight.data[model.config.eos_token_id] *= END_SCALE
    model.save_pretrained(folder)
    for file in (*inputs.model.glob("*token*"), *inputs.model.glob("*.jinja")):
        (folder / file.name).write_bytes(file.read_bytes())
    return attrs.evolve(inputs, model=folder)


def reward_request(words: list[str], cache: str) -> Request:
    os.environ["RLHF_CACHE"] = cache
    request = read_config("sft", overrides=words)
    plugin = attrs.evolve(request.plugin, trainer="odd_trainers:RewardTrainer")
    return attrs.evolve(request, plugin=plugin)


def rewarded(words: list[str], cache: str) -> tuple[int, list[dict[str, Any]]]:
    """Run the trainer on this rank and return its exit code and the lines of metrics.jsonl."""
    request = reward_request(words, cache)
    code = run_rank(request)
    return code, sft_runs.read_metrics(Path(request.config.output or ""))


def printed(words: list[str], cache: str) -> tuple[str, str]:
    """Return what a run and `rlhf inspect` print."""
    request = reward_request(words, cache)
    shown = Console(file=io.StringIO(), width=200)
    inspect_command(request, shown)
    with contextlib.redirect_stdout(io.StringIO()) as text:
        run_rank(request)
    return text.getvalue(), shown.file.getvalue()  # type: ignore[attr-defined]


def test_inspect_shows_the_steps_of_the_run(ending: Inputs, one: Ranks, tmp_path: Path) -> None:
    words = words_of(ending, tmp_path / "run", "--train.stop_at", "1")
    ((run, shown),) = one.run(printed, words, str(ending.cache))
    assert "\nsteps      14 of 4 rows, 12 per epoch\n" in run
    assert shown.splitlines()[-1] == (
        "12 steps of 4 examples per epoch; the run samples the answers that fill its micro-batches"
    )


def words_of(inputs: Inputs, folder: Path, *more: str) -> list[str]:
    length = ("--train.steps", "14", "--train.eval_every", "5", "--optim.lr", "2e-3")
    return sft_runs.words(inputs, folder, *length, "--checkpoint.every", "null", *more)


@pytest.mark.parametrize(
    ("stage", "lag"),
    [
        pytest.param("stage 0", "0", marks=pytest.mark.matrix),
        ("stage 3", "0"),
        pytest.param("stage 3", "1", marks=pytest.mark.matrix),
    ],
)
def test_a_run_that_stops_in_the_middle_of_a_rollout_resumes_to_the_last_bit(
    stage: str, lag: str, ending: Inputs, two: Ranks, tmp_path: Path
) -> None:
    def run(folder: str, *more: str) -> list[dict[str, Any]]:
        lags = ("--rollouts.lag", lag)
        words = words_of(ending, tmp_path / folder, *layouts()[stage], *lags, *more)
        (_, metrics), _ = two.run(rewarded, words, str(ending.cache))
        return [without_timings([line])[0] for line in metrics]

    straight = run("straight")
    # The second epoch begins with step 13; step 6 is the second of four of its rollout.
    assert column(straight, "epoch")[11:13] == [1.0, pytest.approx(1 + 1 / 12)]
    run("halves", "--train.stop_at", "6")
    (folder,) = checkpoints.all_checkpoints(tmp_path / "halves" / "checkpoints")
    assert (folder / FILE).exists()
    halves = run("halves", "--resume", "--train.stop_at", "12")
    *_, folder = checkpoints.all_checkpoints(tmp_path / "halves" / "checkpoints")
    assert not (folder / FILE).exists()
    halves = run("halves", "--resume")
    scheduled = [line for line in halves if line["step"] not in (6, 12) or "loss" in line]
    assert scheduled == straight
    (weights, other) = (
        next((tmp_path / name / "model").glob("*.safetensors")).read_bytes()
        for name in ("straight", "halves")
    )
    assert weights == other


def test_rollouts_and_their_evaluation_are_the_same_on_any_number_of_ranks(
    ending: Inputs, one: Ranks, two: Ranks, tmp_path: Path
) -> None:
    curves = []
    for name, ranks, stage in (("one", one, "stage 0"), ("two", two, "stage 3")):
        words = words_of(
            ending, tmp_path / name, *layouts()[stage], "--train.eval_at_start", "true"
        )
        (_, metrics), *_ = ranks.run(rewarded, words, str(ending.cache))
        curves.append(metrics)
    for name in ("loss", "reward", "finished", "read", "ratio", "eval/reward", "num_tokens"):
        values, others = ([line[name] for line in curve if name in line] for curve in curves)
        assert values == pytest.approx(others, abs=1e-5), name
        assert len(values) == (4 if name == "eval/reward" else 14)
    assert column(curves[0], "clip") == [0.2] * 14
    assert column(curves[0], "read") == pytest.approx(column(curves[0], "logprob"), abs=1e-5)
    # Some answers end, others are cut at six tokens.
    assert 0.0 < max(column(curves[0], "finished")) < 1.0
    first = column(curves[0], "ratio")
    # The first step of a rollout sees the policy that wrote its answers.
    assert [first[step] for step in (0, 4, 8, 12)] == pytest.approx([1.0] * 4, abs=1e-5)
    assert first[1] != pytest.approx(1.0, abs=1e-4)
    lengths = column(curves[0], "num_tokens")
    assert len({after - before for before, after in pairwise(lengths)}) > 3


@pytest.mark.matrix
def test_a_lag_gives_one_curve_on_any_number_of_ranks(
    ending: Inputs, one: Ranks, two: Ranks, tmp_path: Path
) -> None:
    curves = []
    for name, ranks, stage in (("one", one, "stage 0"), ("two", two, "stage 3")):
        words = words_of(ending, tmp_path / name, *layouts()[stage], "--rollouts.lag", "1")
        (_, metrics), *_ = ranks.run(rewarded, words, str(ending.cache))
        curves.append(metrics)
    for name in ("loss", "reward", "logprob", "ratio", "eval/reward", "num_tokens"):
        values, others = ([line[name] for line in curve if name in line] for curve in curves)
        assert values == pytest.approx(others, abs=1e-5), name
    # The old log-probabilities are those of the first step of the rollout, not of the draw.
    first = column(curves[0], "ratio")
    assert [first[step] for step in (0, 4, 8, 12)] == pytest.approx([1.0] * 4, abs=1e-5)


def test_the_reward_on_held_out_prompts_chooses_the_best_checkpoint(
    ending: Inputs, two: Ranks, tmp_path: Path
) -> None:
    words = words_of(
        ending, tmp_path / "run", "--checkpoint.best=-eval/reward", "--train.patience", "1",
        "--train.eval_at_start", "true", "--train.steps", "30", "--optim.lr", "5e-4",
    )  # fmt: skip
    (_, metrics), _ = two.run(rewarded, words, str(ending.cache))
    rewards = {line["step"]: line["eval/reward"] for line in metrics if "eval/reward" in line}
    # The reward rises, so that an evaluation in search of a low one is the best at first.
    assert rewards[10] > rewards[5] > rewards[0], rewards
    assert list(rewards) == [0, 5, 10]
    kept = checkpoints.all_checkpoints(tmp_path / "run" / "checkpoints")
    assert [checkpoints.step_of(path) for path in kept] == [5, 10]
