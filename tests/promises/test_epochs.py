"""A part of an epoch is the first part of its optimizer steps, with a schedule of its own."""

from datetime import date
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

import sft_runs
from rlhf.request.reader import read_config
from rlhf.train.dataset import Dataset
from rlhf_devkit.plain import PlainBackend
from sft_runs import Inputs

LENGTHS = [
    ("1", 6), ("2", 12), ("2.0", 12), ("0.5", 3), ("0.51", 4), ("1e-9", 1), ("1.5", 9), ("0.1", 1),
    ("2.3333", 14),
]  # fmt: skip


def dataset(trainer: Any, rows: int) -> Dataset:
    examples: Any = range(rows)
    return Dataset(trainer=trainer, train=examples, eval=None, day=date(2026, 1, 1))


@pytest.mark.parametrize(("epochs", "steps"), LENGTHS)
def test_a_part_of_a_step_counts_as_a_step(epochs: str, steps: int, inputs: Inputs) -> None:
    words = sft_runs.words(inputs, Path("run"), "--train.epochs", epochs)
    config = read_config("sft", overrides=words).config
    trainer: Any = SimpleNamespace(needs_rollout=lambda: False)
    data = dataset(trainer, 22)
    assert data.num_steps(config) == steps


def test_decimal_parts_of_an_epoch_are_exact(inputs: Inputs) -> None:
    trainer: Any = SimpleNamespace(needs_rollout=lambda: False)
    data = dataset(trainer, 120)
    for tenths in range(1, 100):  # 0.7 * 30 is 20.999999999999996, and 1.1 * 30 is more than 33.
        words = sft_runs.words(inputs, Path("run"), f"--train.epochs={tenths / 10}")
        assert data.num_steps(read_config("sft", overrides=words).config) == 3 * tenths


def column(metrics: list[dict[str, Any]], name: str) -> list[float]:
    return [line[name] for line in metrics]


def test_half_an_epoch_is_the_first_half_of_one_and_resumes_exactly(
    inputs: Inputs, tmp_path: Path
) -> None:
    def run(name: str, *more: str) -> list[dict[str, Any]]:
        words = sft_runs.words(inputs, tmp_path / name, "--optim.warmup", "0", *more)
        code, metrics = sft_runs.run(words, str(inputs.cache), backend=PlainBackend())
        assert code == 0
        return [line for line in metrics if "loss" in line]

    constant = ("--optim.schedule", "constant")
    whole = run("whole", "--train.epochs", "1", *constant)
    half = run("half", "--train.epochs", "0.5", *constant)
    assert column(half, "step") == [1, 2, 3]
    assert column(half, "loss") == column(whole, "loss")[:3]
    assert column(half, "epoch")[-1] == 0.5

    linear = ("--train.epochs", "1.5", "--optim.schedule", "linear")
    at_once = run("at once", *linear)
    rates = column(at_once, "learning_rate")
    assert rates == pytest.approx([1e-2 * (1 - k / 9) for k in range(9)])
    run("twice", *linear, "--train.stop_at", "7")
    resumed = run("twice", *linear, "--resume")
    assert column(resumed, "loss") == column(at_once, "loss")
    recorded = yaml.safe_load((tmp_path / "half" / "config.yaml").read_text())
    assert recorded["train"]["epochs"] == 0.5
    text = (tmp_path / "whole" / "config.yaml").read_text()
    assert "  epochs: 1\n" in text
