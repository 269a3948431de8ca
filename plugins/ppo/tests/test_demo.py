"""`rlhf run ppo` without a model and data: the embedded model learns sums in brackets."""

from pathlib import Path

import pytest

from rlhf_devkit import shared, tiny


@pytest.mark.matrix
def test_the_demo_moves_the_held_out_accuracy(tmp_path: Path) -> None:
    words = ["--output", str(tmp_path / "run")]
    metrics = shared(1).run(tiny.run, "ppo", words, str(tmp_path / "cache"), timeout=600)[0]
    evaluations = [line for line in metrics if "eval/loss" in line]
    first, last = (evaluations[place]["eval/rewards/solved/mean"] for place in (0, -1))
    assert first < 0.5
    assert last >= 0.75
