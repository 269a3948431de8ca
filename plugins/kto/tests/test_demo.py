"""`rlhf run kto` alone: the embedded model comes to prefer right solutions on held-out rows."""

from pathlib import Path

import pytest

from rlhf_devkit import shared, tiny


@pytest.mark.matrix
def test_the_demo_moves_the_held_out_margin(tmp_path: Path) -> None:
    words = ["--output", str(tmp_path / "run")]
    metrics = shared(1).run(tiny.run, "kto", words, str(tmp_path / "cache"), timeout=600)[0]
    first, last = (line for line in metrics if "eval/loss" in line)
    # The cached reference is the policy itself, up to rounding in another packing.
    assert abs(first["eval/rewards/margins"]) < 1e-4
    assert last["eval/rewards/margins"] > 1
    assert last["eval/loss"] < first["eval/loss"] - 0.04
