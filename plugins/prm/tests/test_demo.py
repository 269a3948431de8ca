"""`rlhf run prm` alone: the embedded model comes to tell wrong steps of held-out problems."""

from pathlib import Path

from rlhf.testing import tiny
from rlhf.testing.ranks import shared


def test_the_demo_moves_the_held_out_area_under_the_curve(tmp_path: Path) -> None:
    words = ["--output", str(tmp_path / "run")]
    metrics = shared(1).run(tiny.run, "prm", words, str(tmp_path / "cache"), timeout=600)[0]
    evaluations = [line for line in metrics if "eval/loss" in line]
    first, last = evaluations[0], evaluations[-1]
    assert first["eval/auc"] < 0.55
    assert last["eval/auc"] > 0.63
    assert last["eval/loss"] < first["eval/loss"] - 0.05
