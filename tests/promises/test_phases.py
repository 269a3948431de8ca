"""Runs whose states are on the host in evaluations, caching and generation: the same curve."""

import contextlib
import io
import os
from collections.abc import Collection
from pathlib import Path
from typing import Any

import pytest

import sft_runs
from rlhf.engine import StateKind
from rlhf.hookspecs import hookimpl
from rlhf.request.reader import read_config
from rlhf.train.rank import run_rank
from rlhf_demo import rows
from rlhf_devkit import write_rows
from rlhf_devkit.ranks import Ranks
from rlhf_plugin_deepspeed.backend import DeepSpeedBackend
from sft_runs import Inputs

TRAINING = ("optimizer", "masters", "gradients")
ALL = (*TRAINING, "weights")


class Recording(DeepSpeedBackend):
    """Records which states of which engines were moved, and that it released memory."""

    def __init__(self) -> None:
        super().__init__()
        self.moved: dict[tuple[str, tuple[StateKind, ...]], int] = {}

    @hookimpl
    def offload_states(self, engine: Any, kinds: Collection[StateKind]) -> int:
        size = super().offload_states(engine, kinds)
        key = engine.role, tuple(kinds)
        self.moved[key] = max(size, self.moved.get(key, 0))
        return size


def run(name: str, words: list[str], cache: str) -> tuple[str, list[dict[str, Any]], Any]:
    """What a run prints, its metrics, and the most bytes released by engine and kinds."""
    os.environ["RLHF_CACHE"] = cache
    request, backend = read_config(name, overrides=words), Recording()
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        assert run_rank(request, backend=backend)[1] == "done"
    return (
        printed.getvalue(),
        sft_runs.read_metrics(Path(request.config.output or "")),
        backend.moved,
    )


def curve(metrics: list[dict[str, Any]]) -> list[Any]:
    names = ("loss", "grad_norm", "eval/loss")
    return [{name: row[name] for name in names if name in row} for row in metrics]


def both(
    ranks: Ranks, name: str, words: list[str], folder: Path
) -> tuple[str, dict[tuple[str, tuple[str, ...]], int]]:
    """Run with states that stay and with states that move; the curves must be equal. Returns what
    the second prints and moves."""
    results = {}
    for mode in ("never", "always"):
        more = ["--deepspeed.offload_states", mode, "--output", str(folder / mode)]
        results[mode] = ranks.run(run, name, [*words, *more], str(folder / f"cache-{mode}"))[0]
    (quiet, stays, nothing), (printed, moves, moved) = results["never"], results["always"]
    assert "offload " not in quiet
    assert nothing == {}
    assert curve(moves) == curve(stays)
    return printed, moved


@pytest.mark.parametrize("stage", ["0", "2", "3"])
def test_an_evaluation_has_the_optimizers_states_on_the_host(
    inputs: Inputs, two: Ranks, tmp_path: Path, stage: str
) -> None:
    more = ["--deepspeed.stage", stage, "--train.steps", "4", "--train.eval_every", "2"]
    more += ["--train.eval_at_start", "true"]
    words = [*sft_runs.words(inputs, tmp_path), *more]
    printed, moved = both(two, "sft", words, tmp_path)
    assert list(moved) == [("policy", TRAINING)]
    assert moved["policy", TRAINING] > 10_000
    lines = [line for line in printed.splitlines() if line.startswith("offload ")]
    assert lines == ["offload    evaluation: 0.000 GiB of states moved to the host, as configured"]


def test_a_reference_is_cached_without_the_optimizers_states(
    inputs: Inputs, one: Ranks, tmp_path: Path
) -> None:
    pairs = rows("arithmetic", "train", "preference")[:8]
    words = [
        "--model", str(inputs.model), "--model.dtype", "bf16", "--train.steps", "2",
        "--data.train", str(write_rows(tmp_path / "pairs.jsonl", pairs)), "--data.workers", "0",
        "--batch.size", "4", "--batch.tokens", "256", "--dpo.reference", "cache",
        "--deepspeed.stage", "1",
    ]  # fmt: skip
    printed, moved = both(one, "dpo", words, tmp_path)
    assert list(moved) == [("policy", TRAINING)]
    assert moved["policy", TRAINING] > 10_000
    assert "offload    caching: " in printed


def test_answers_are_generated_without_the_teachers_weights(
    inputs: Inputs, two: Ranks, tmp_path: Path
) -> None:
    words = [
        *sft_runs.words(inputs, tmp_path), "--kd.teacher", str(inputs.model),
        "--kd.on_policy", "0.5", "--kd.max_new_tokens", "4", "--train.steps", "2",
        "--deepspeed.stage", "2",
        # Weights that are whole stay in the mapped file on a CPU.
        "--deepspeed.frozen", "3",
    ]  # fmt: skip
    printed, moved = both(two, "kd", words, tmp_path)
    assert {("teacher", ALL), ("policy", TRAINING)} <= set(moved)
    assert min(moved["teacher", ALL], moved["policy", TRAINING]) > 10_000
    assert "offload    generation: " in printed
