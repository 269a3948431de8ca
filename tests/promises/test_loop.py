"""The loop with trainers that need more of it than supervised fine-tuning does."""

import contextlib
import gc
import io
import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

import sft_runs
from odd_trainers import run_odd
from rlhf.errors import RLHFError
from rlhf.hookspecs import hookimpl
from rlhf.model import probe
from rlhf.request.reader import read_config
from rlhf.train import loop
from rlhf_devkit import column, write_rows
from rlhf_devkit.ranks import Ranks
from rlhf_plugin_deepspeed.backend import DeepSpeedBackend
from sft_runs import Inputs


def test_a_loss_with_a_survey_does_not_depend_on_the_split(
    inputs: Inputs, one: Ranks, two: Ranks, tmp_path: Path
) -> None:
    def run(ranks: Ranks, name: str, *more: str) -> list[dict[str, Any]]:
        words = sft_runs.words(inputs, tmp_path / name, "--optim.lr", "1e-4", *more)
        return ranks.run(run_odd, "SurveyTrainer", words, str(inputs.cache))[0][1]

    whole = run(one, "whole", "--batch.tokens", "1024")
    split = run(two, "split", "--batch.tokens", "64", "--deepspeed.stage", "2")
    for name in ("loss", "spread", "derived"):
        assert column(split, name) == pytest.approx(column(whole, name), rel=1e-4), name
    for name in ("eval/loss", "eval/spread"):
        assert split[-1][name] == pytest.approx(whole[-1][name], rel=1e-4), name


def printed_errors(words: list[str], cache: str) -> str:
    """What a run prints to standard error."""
    with contextlib.redirect_stderr(io.StringIO()) as printed:
        sft_runs.run(words, cache)
    return printed.getvalue()


def test_a_run_that_could_not_save_within_the_stop_timeout_warns_once(
    inputs: Inputs, one: Ranks, tmp_path: Path
) -> None:
    def errors(name: str, timeout: str) -> str:
        more = ("--train.steps", "2", "--checkpoint.every", "1")
        words = sft_runs.words(inputs, tmp_path / name, *more, "--checkpoint.stop_timeout", timeout)
        return one.run(printed_errors, words, str(inputs.cache))[0]

    numbers = r"\d+\.\d s"
    assert re.fullmatch(
        rf"warning: a stopped run needs about {numbers} to save \(a step takes {numbers} and a "
        rf"checkpoint {numbers}\), but checkpoint.stop_timeout is 0.001 s; raise it\n",
        errors("short", "0.001"),
    )
    assert "stop_timeout" not in errors("long", "600")


class Adafactor(DeepSpeedBackend):
    """The backend as an extension leaves it whose optimizer keeps rows and columns."""

    @hookimpl
    def build_optimizer(self, groups: Any, config: Any, plan: Any) -> Any:
        return torch.optim.Adafactor([dict(group) for group in groups], lr=config.optim.lr)


def test_a_run_whose_optimizer_cannot_be_saved_ends_at_its_first_step(
    inputs: Inputs, tmp_path: Path
) -> None:
    words = sft_runs.words(inputs, tmp_path / "run", "--deepspeed.stage", "0")
    with pytest.raises(RLHFError) as error:
        sft_runs.run(words, str(inputs.cache), backend=Adafactor())
    assert str(error.value) == (
        "Adafactor keeps row_var, which does not have one element per weight, so that a checkpoint "
        "could not be read in another layout; use another optimizer"
    )
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


def test_an_evaluation_is_one_mean_however_many_steps_it_takes(
    inputs: Inputs, one: Ranks, tmp_path: Path
) -> None:
    first = []
    for size in ("2", "7"):
        more = ("--batch.size", size, "--train.steps", "1", "--train.eval_at_start", "true")
        words = sft_runs.words(inputs, tmp_path / size, *more)
        ((_, metrics),) = one.run(sft_runs.run, words, str(inputs.cache))
        first.append(metrics[0])
    for name in ("eval/loss", "eval/entropy", "eval/mean_token_accuracy"):
        assert first[0][name] == pytest.approx(first[1][name], rel=1e-5), name


def run_with_a_failing_path(words: list[str], cache: str) -> str:
    """A run in which the tree fails on rank 1 only; returns the path that the run takes."""

    def largest_error(*arguments: Any, **options: Any) -> float:
        return worst.pop() if worst else error(*arguments, **options)

    worst, error = [9.0] * torch.distributed.get_rank(), probe.largest_error
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(io.StringIO()) as out:
        patch.setattr(probe, "largest_error", largest_error)
        sft_runs.run(words, cache)
    return out.getvalue()


def test_ranks_try_the_paths_together(inputs: Inputs, two: Ranks, tmp_path: Path) -> None:
    # Weights of a small model would otherwise stay whole between forward passes.
    sharded = "{stage3_max_reuse_distance: 0, stage3_prefetch_bucket_size: 0}"
    words = sft_runs.words(
        inputs, tmp_path / "run", "--train.steps", "1", "--deepspeed.stage", "3",
        "--deepspeed.persistence_threshold", "0",
        "--deepspeed.config", f"{{zero_optimization: {sharded}}}",
    )  # fmt: skip
    printed, _ = two.run(run_with_a_failing_path, words, str(inputs.cache))
    assert "(tree was off by 9.0e+00)" in printed


def run_padded(words: list[str], cache: str) -> tuple[int, list[dict[str, Any]]]:
    """A run of a model for which padded rows are the best way."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(probe, "candidates_of", lambda *_: (("padded",), "forced by the test"))
        return run_odd("SurveyTrainer", words, cache)


def test_padding_is_reported_for_a_single_row_only(
    inputs: Inputs, one: Ranks, tmp_path: Path
) -> None:
    words = sft_runs.words(inputs, tmp_path / "row", "--train.steps", "2")
    ((_, in_one_row),) = one.run(run_odd, "SurveyTrainer", words, str(inputs.cache))
    words = sft_runs.words(inputs, tmp_path / "rows", "--train.steps", "2")
    ((_, padded),) = one.run(run_padded, words, str(inputs.cache))
    assert column(in_one_row, "padding") == [0.0, 0.0]
    assert column(padded, "loss") == pytest.approx(column(in_one_row, "loss"), rel=1e-4)
    assert not any("padding" in line for line in padded)


def collected(words: list[str], cache: str) -> list[str]:
    """The devices on which a run frees what its start and its first step have left."""
    devices: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop, "collect", devices.append)
        sft_runs.run(words, cache)
    return devices


def test_garbage_of_the_start_and_the_first_step_is_collected(
    inputs: Inputs, one: Ranks, tmp_path: Path
) -> None:
    words = sft_runs.words(inputs, tmp_path / "run", "--train.steps", "3")
    assert one.run(collected, words, str(inputs.cache)) == [["cpu", "cpu"]]


def skipped(words: list[str], cache: str) -> tuple[int, int]:
    """How many objects the collector skips before and after a run."""
    before = gc.get_freeze_count()
    sft_runs.run(words, cache)
    return before, gc.get_freeze_count()


def test_garbage_collection_skips_libraries_but_not_objects_of_a_run(
    inputs: Inputs, one: Ranks, tmp_path: Path
) -> None:
    words = sft_runs.words(inputs, tmp_path / "run", "--train.steps", "1")
    one.run(sft_runs.run, words, str(inputs.cache))
    ((before, after),) = one.run(skipped, [*words, "--overwrite"], str(inputs.cache))
    # What was skipped before can still be freed by its last reference.
    assert 100_000 < after <= before


def test_the_trainers_own_state_is_resumed(inputs: Inputs, one: Ranks, tmp_path: Path) -> None:
    words = sft_runs.words(inputs, tmp_path / "run", "--train.steps", "4", "--train.stop_at", "2")
    one.run(run_odd, "SurveyTrainer", words, str(inputs.cache))
    ((code, metrics),) = one.run(
        run_odd, "SurveyTrainer", [*words, "--train.stop_at", "4", "--resume"], str(inputs.cache)
    )
    assert code == 0
    assert column(metrics, "step") == [1, 2, 3, 4]


def test_a_poisoned_row_is_named_whichever_rank_has_it_and_no_weight_is_changed(
    inputs: Inputs, two: Ranks, tmp_path: Path
) -> None:
    rows = [json.loads(line) for line in inputs.train.read_text().splitlines()]
    rows[6]["note"] = "the poisoned row"
    poisoned = write_rows(tmp_path / "poisoned.jsonl", rows)
    words = sft_runs.words(inputs, tmp_path / "run", "--data.train", str(poisoned))
    for message in two.errors(run_odd, "PoisonedTrainer", words, str(inputs.cache)):
        assert f"the loss is nan in {poisoned} line 7" in message
        assert "no weight was changed; look at these rows, or lower optim.lr" in message


@pytest.mark.parametrize("trainer", ["UnevenTrainer", "UnevenEvaluationTrainer"])
def test_metrics_that_differ_between_ranks_end_the_run_in_one_sentence(
    trainer: str, inputs: Inputs, two: Ranks, tmp_path: Path
) -> None:
    words = sft_runs.words(
        inputs, tmp_path / "run", "--train.steps", "4", "--train.eval_every", "2"
    )
    expected = (
        "trainer 'sft': loss() must name the same terms and metrics on all ranks, but metric "
        "'extra' is missing on rank 0 and per 'tokens' on rank 1; return it for every micro-batch, "
        "also for one without rows"
    )
    for message in two.errors(run_odd, trainer, words, str(inputs.cache)):
        assert expected in message
    lines = 0 if trainer == "UnevenTrainer" else 2
    metrics = tmp_path / "run" / "metrics.jsonl"
    assert len(metrics.read_text().splitlines() if metrics.exists() else []) == lines


def test_the_demo_report_is_printed_only_for_the_demo(inputs: Inputs, tmp_path: Path) -> None:
    assert not read_config("sft", overrides=sft_runs.words(inputs, tmp_path)).demo
    assert read_config("sft").demo
