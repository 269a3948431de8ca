"""`rlhf run rm` alone: the embedded model comes to rank answers to held-out problems."""

from pathlib import Path

from rlhf.testing import tiny
from rlhf.testing.ranks import shared


def test_the_demo_moves_the_held_out_accuracy(tmp_path: Path) -> None:
    words = ["--output", str(tmp_path / "run")]
    metrics = shared(1).run(tiny.run, "rm", words, str(tmp_path / "cache"), timeout=600)[0]
    evaluations = [line for line in metrics if "eval/loss" in line]
    first, last = evaluations[0], evaluations[-1]
    assert first["eval/accuracy"] < 0.6
    assert last["eval/accuracy"] > 0.75
    assert last["eval/loss"] < first["eval/loss"] - 0.2
