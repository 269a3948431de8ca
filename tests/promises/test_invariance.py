"""The loss curve does not depend on the hardware: ranks, ZeRO stage, offload, micro-batches,
recomputation, backend."""

from pathlib import Path
from typing import Any

import pytest

import sft_runs
from rlhf_devkit import column
from rlhf_devkit.plain import PlainBackend
from rlhf_devkit.ranks import Ranks, ranks_fixture
from sft_runs import Inputs

STAGE_3 = ("--deepspeed.stage", "3", "--deepspeed.persistence_threshold", "0")
CASES = {
    "one rank, stage 0": (1, ("--deepspeed.stage", "0")),
    "one rank, 64 tokens": (1, ("--deepspeed.stage", "0", "--batch.tokens", "64")),
    "one rank, one micro-batch": (1, ("--deepspeed.stage", "0", "--batch.tokens", "1024")),
    "recomputed products": (1, ("--deepspeed.stage", "0", "--model.recompute", "selective")),
    "recomputed products at stage 3": (2, (*STAGE_3, "--model.recompute", "selective")),
    "recomputation": (1, ("--deepspeed.stage", "0", "--model.recompute", "full")),
    "two ranks, stage 0": (2, ("--deepspeed.stage", "0")),
    "two ranks, stage 1": (2, ("--deepspeed.stage", "1")),
    "two ranks, stage 2": (2, ("--deepspeed.stage", "2", "--batch.tokens", "64")),
    "two ranks, stage 2, recomputation": (
        2,
        ("--deepspeed.stage", "2", "--model.recompute", "full"),
    ),
    "two ranks, stage 3": (2, STAGE_3),
    "two ranks, stage 3, recomputation": (
        2,
        (*STAGE_3, "--model.recompute", "full", "--batch.tokens", "64"),
    ),
    "four ranks, stage 2": (4, ("--deepspeed.stage", "2", "--batch.tokens", "64")),
    "four ranks, stage 3": (4, STAGE_3),
    "two ranks, stage 1, optimizer on the CPU": (
        2,
        ("--deepspeed.stage", "1", "--deepspeed.offload_optimizer", "true"),
    ),
    "two ranks, stage 2, optimizer on the CPU": (
        2,
        ("--deepspeed.stage", "2", "--deepspeed.offload_optimizer", "true"),
    ),
    "two ranks, stage 3, optimizer on the CPU": (
        2,
        (*STAGE_3, "--deepspeed.offload_optimizer", "true"),
    ),
    "two ranks, stage 3, all on the CPU": (
        2,
        (
            *STAGE_3,
            *("--deepspeed.offload_optimizer", "true", "--deepspeed.offload_param", "true"),
        ),
    ),
}
four = ranks_fixture(4)
QUICK = (
    "one rank, 64 tokens",
    "recomputed products",
    "two ranks, stage 0",
    "two ranks, stage 1",
    "two ranks, stage 2, recomputation",
    "two ranks, stage 3",
    "two ranks, stage 3, all on the CPU",
)
"""One case of everything that the curve must not depend on."""


@pytest.fixture(scope="module")
def plain(inputs: Inputs, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """The curve in plain torch, one process, no DeepSpeed: what all others are held against."""
    words = sft_runs.words(inputs, tmp_path_factory.mktemp("plain") / "run", "--train.epochs", "2")
    code, metrics = sft_runs.run(words, str(inputs.cache), backend=PlainBackend())
    assert code == 0
    return metrics


@pytest.mark.parametrize(
    "name",
    [name if name in QUICK else pytest.param(name, marks=pytest.mark.matrix) for name in CASES],
)
def test_the_curve_is_that_of_plain_torch(
    name: str,
    plain: list[dict[str, Any]],
    inputs: Inputs,
    one: Ranks,
    two: Ranks,
    four: Ranks,
    tmp_path: Path,
) -> None:
    world, words = CASES[name]
    ranks = {1: one, 2: two, 4: four}[world]
    words = tuple(sft_runs.words(inputs, tmp_path / "run", "--train.epochs", "2", *words))
    results = ranks.run(sft_runs.run, list(words), str(inputs.cache))
    metrics = results[0][1]
    assert column(metrics, "loss") == pytest.approx(column(plain, "loss"), abs=1e-5)
    norms = column(plain, "grad_norm")
    assert all(norm > 0.5 for norm in norms), "clipping has to act for this test to mean something"
    assert column(metrics, "grad_norm") == pytest.approx(norms, rel=1e-4)
    assert metrics[-1]["eval/loss"] == pytest.approx(plain[-1]["eval/loss"], abs=1e-5)


@pytest.mark.parametrize("stage", [pytest.param("0", marks=pytest.mark.matrix), "1", "2", "3"])
def test_states_in_bf16_keep_to_the_curve(
    stage: str, inputs: Inputs, one: Ranks, two: Ranks, tmp_path: Path
) -> None:
    def run(ranks: Ranks, *more: str) -> list[float]:
        steps = ("--train.steps", "20", "--optim.lr", "2e-3", "--deepspeed.stage", stage)
        words = sft_runs.words(inputs, tmp_path / "run", "--overwrite", *steps, *more)
        return column(ranks.run(sft_runs.run, words, str(inputs.cache))[0][1], "loss")

    exact = run(one)
    rounded = run(two, "--model.dtype", "bf16", "--optim.states", "bf16")
    assert exact[-1] < exact[0] - 1
    assert rounded == pytest.approx(exact, abs=1e-2)


def test_the_curve_falls(plain: list[dict[str, Any]]) -> None:
    losses = column(plain, "loss")
    assert len(losses) == 12
    assert losses[-1] < 0.7 * losses[0]
