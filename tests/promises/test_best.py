"""The best checkpoint by a chosen metric, and the end of a run that no longer improves."""

import os
import signal
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from torch import distributed

import sft_runs
from rlhf.errors import RLHFError
from rlhf.folder import checkpoints as checkpoint
from rlhf.request.reader import read_config
from rlhf.train.stop import StopWatch
from rlhf_devkit import column
from rlhf_devkit.ranks import Ranks
from sft_runs import Inputs

EVALUATED = ("--train.eval_every", "2", "--checkpoint.best=+eval/loss", "--checkpoint.keep", "1")
"""An evaluation after every other step; only the newest checkpoint stays, and the best. The loss is
to rise, which it does not: the first evaluation is the best."""


def evaluations(metrics: list[dict[str, Any]]) -> dict[int, float]:
    """The loss of every evaluation by its step."""
    return {line["step"]: line["eval/loss"] for line in metrics if "eval/loss" in line}


def kept(folder: Path) -> list[int]:
    return [checkpoint.step_of(path) for path in checkpoint.all_checkpoints(folder / "checkpoints")]


STAGES = {
    "0": ("--deepspeed.stage", "0"),
    "3": ("--deepspeed.stage", "3", "--deepspeed.persistence_threshold", "100"),
}


@pytest.mark.parametrize("stage", STAGES)
def test_the_best_checkpoint_outlives_rotation_and_is_the_exported_model(
    stage: str, inputs: Inputs, two: Ranks, tmp_path: Path
) -> None:
    words = (*EVALUATED, "--train.steps", "6", *STAGES[stage])
    given = sft_runs.words(inputs, tmp_path / "run", *words)
    (_, metrics), _ = two.run(sft_runs.run, given, str(inputs.cache))
    losses = list(evaluations(metrics).values())
    assert losses == sorted(losses, reverse=True)
    assert kept(tmp_path / "run") == [2, 6]
    # The model of a run that ends there is the same to the last bit.
    until = ("--train.stop_at", "2", "--checkpoint.best", "null")
    given = sft_runs.words(inputs, tmp_path / "until", *words, *until)
    two.run(sft_runs.run, given, str(inputs.cache))
    assert weights(tmp_path / "run") == weights(tmp_path / "until")


def test_patience_ends_the_run_and_a_resume_in_between_changes_nothing(
    inputs: Inputs, two: Ranks, tmp_path: Path
) -> None:
    def run(folder: str, *more: str) -> list[dict[str, Any]]:
        words = (*EVALUATED, "--train.steps", "20", "--train.patience", "2", *more)
        given = sft_runs.words(inputs, tmp_path / folder, *words)
        results = two.run(sft_runs.run, given, str(inputs.cache))
        assert [code for code, _ in results] == [0, 0]
        return results[0][1]

    straight = run("straight")
    assert list(evaluations(straight)) == [2, 4, 6]
    assert kept(tmp_path / "straight") == [2, 6]
    run("halves", "--train.stop_at", "4")
    halves = run("halves", "--resume")
    assert evaluations(halves) == evaluations(straight)
    assert weights(tmp_path / "halves") == weights(tmp_path / "straight")
    assert run("halves", "--resume") == halves
    longer = run("halves", "--resume", "--train.patience", "3")
    assert list(evaluations(longer)) == [2, 4, 6, 8]


def signalled(words: list[str], cache: str, step: int) -> tuple[int, list[dict[str, Any]]]:
    """A run of which only the second rank gets a signal after that step."""
    reason = StopWatch.reason

    def reason_after_signal(self: StopWatch, done: int) -> str | None:
        if done == step and distributed.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGTERM)
        return reason(self, done)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(StopWatch, "reason", reason_after_signal)
        return sft_runs.run(words, cache)


def test_an_evaluation_that_a_signal_skipped_is_made_on_resume(
    inputs: Inputs, two: Ranks, tmp_path: Path
) -> None:
    def words(folder: str, *more: str) -> list[str]:
        given = (*EVALUATED, "--train.steps", "20", "--train.patience", "2", *more)
        return sft_runs.words(inputs, tmp_path / folder, *given)

    (_, straight), _ = two.run(sft_runs.run, words("straight"), str(inputs.cache))
    # All ranks know of it a step later.
    stopped = two.run(signalled, words("halves"), str(inputs.cache), 3)
    assert [code for code, _ in stopped] == [143, 143]
    assert kept(tmp_path / "halves") == [2, 4]
    assert list(evaluations(stopped[0][1])) == [2]
    (_, halves), _ = two.run(sft_runs.run, words("halves", "--resume"), str(inputs.cache))
    assert evaluations(halves) == evaluations(straight)
    assert weights(tmp_path / "halves") == weights(tmp_path / "straight")
    # The last that patience allows is made up for too.
    two.run(signalled, words("last"), str(inputs.cache), 5)
    (_, last), _ = two.run(sft_runs.run, words("last", "--resume"), str(inputs.cache))
    assert evaluations(last) == evaluations(straight)
    assert column(last, "loss") == column(straight, "loss")


def falling(
    one: Ranks, inputs: Inputs, folder: Path, steps: str, keep: str, *more: str
) -> list[dict[str, Any]]:
    """A run whose best evaluation is the one with the least loss, with a checkpoint at every
    step."""
    best = ("--train.eval_every", "2", "--checkpoint.best=eval/loss", "--train.steps", steps)
    saved = ("--checkpoint.every", "1", "--checkpoint.keep", keep)
    words = sft_runs.words(inputs, folder, *best, *saved, *more)
    ((code, metrics),) = one.run(sft_runs.run, words, str(inputs.cache))
    assert code == 0
    return metrics


def test_resuming_an_older_checkpoint_restores_the_best_model_of_that_time(
    inputs: Inputs, one: Ranks, tmp_path: Path
) -> None:
    run = partial(falling, one, inputs, tmp_path / "run", "6", "9")
    run("--train.stop_at", "2")
    early = weights(tmp_path / "run")
    for step in ("2", "3"):
        losses = evaluations(run("--resume"))
        assert min(losses, key=losses.__getitem__) == 6
        assert weights(tmp_path / "run") != early
        # Nothing is evaluated from there on, so nothing is better.
        run("--resume", f"step-{step}", "--train.stop_at", "3", "--train.eval_every", "9")
        assert weights(tmp_path / "run") == early, step


def test_the_search_restarts_if_the_best_checkpoint_was_deleted(
    inputs: Inputs, one: Ranks, tmp_path: Path
) -> None:
    run = partial(falling, one, inputs, tmp_path / "run", "7", "3")
    run()
    best = weights(tmp_path / "run")
    assert kept(tmp_path / "run") == [5, 6, 7]
    # The best until then was step 4. Without another evaluation the last weights are the model.
    run("--resume", "step-5", "--train.stop_at", "6", "--train.eval_every", "9")
    assert weights(tmp_path / "run") != best
    again = run("--resume")
    assert max(evaluations(again)) == 7
    assert weights(tmp_path / "run") == best


def test_an_unknown_metric_is_an_error_that_lists_the_available_ones(
    inputs: Inputs, one: Ranks, tmp_path: Path
) -> None:
    words = sft_runs.words(inputs, tmp_path / "run", *EVALUATED, "--checkpoint.best=+eval/bleu")
    (error,) = one.errors(sft_runs.run, words, str(inputs.cache))
    assert (
        "checkpoint.best: eval/bleu is not a metric of this run's evaluations; available: "
        "eval/entropy, eval/loss, eval/mean_token_accuracy" in error
    )


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (
            ["--checkpoint.best", "eval/kl"],
            "checkpoint.best: eval/kl needs a direction; write +eval/kl or -eval/kl (rise or fall)",
        ),
        (
            ["--checkpoint.best", "loss"],
            "checkpoint.best: expected a metric of an evaluation such as eval/loss, got loss",
        ),
        (
            ["--train.patience", "2", "--train.eval_every", "1"],
            "train.patience needs checkpoint.best",
        ),
        (
            ["--train.patience", "2", "--checkpoint.best", "eval/loss"],
            "train.patience needs train.eval_every",
        ),
    ],
)
def test_settings_without_effect_are_refused(
    words: list[str], text: str, inputs: Inputs, tmp_path: Path
) -> None:
    with pytest.raises(RLHFError) as error:
        read_config("sft", overrides=sft_runs.words(inputs, tmp_path, *words))
    assert str(error.value) == text


def weights(folder: Path) -> bytes:
    return (folder / "model" / "model.safetensors").read_bytes()
