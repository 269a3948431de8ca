"""The schedule, by itself and in a run."""

from pathlib import Path

import pytest

from rlhf_devkit import LIKELIHOOD, column, run, shared, short_run
from rlhf_extension_new_name.schedule import rate


def test_the_rate_rises_stays_and_falls_to_zero() -> None:
    rates = [rate(step, steps=10, warmup=1, decay=0.2) for step in range(10)]
    assert rates == pytest.approx([0.5, *[1.0] * 7, 1 - 0.5**0.5, 0.0])


def test_a_run_has_this_schedule(tmp_path: Path) -> None:
    words = [*short_run(tmp_path, "demonstration"), "--output", str(tmp_path / "run")]
    words += ["--optim.lr", "1e-3", "--optim.warmup", "0", "--extensions.new_name.decay", "0.5"]
    (metrics,) = shared(1).run(run, LIKELIHOOD, words, str(tmp_path / "cache"))
    expected = [1e-3 * rate(step, steps=4, warmup=0, decay=0.5) for step in range(4)]
    assert column(metrics, "learning_rate") == pytest.approx(expected)
