"""`rlhf run prm` alone: the embedded model comes to tell wrong steps of held-out problems."""

import re
from pathlib import Path

import pytest

from rlhf_devkit import shared, tiny
from rlhf_plugin_prm.report import report


@pytest.mark.matrix
def test_the_demo_moves_the_held_out_area_under_the_curve(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--output", str(tmp_path / "run")]
    metrics = shared(1).run(tiny.run, "prm", words, str(tmp_path / "cache"), timeout=600)[0]
    evaluations = [line for line in metrics if "eval/loss" in line]
    first, last = evaluations[0], evaluations[-1]
    assert first["eval/auc"] < 0.55
    assert last["eval/auc"] > 0.8
    assert last["eval/accuracy"] > first["eval/accuracy"] + 0.2
    assert last["eval/first_error_accuracy"] > first["eval/first_error_accuracy"] + 0.25
    assert last["eval/loss"] < first["eval/loss"] - 0.2
    report(None, tmp_path / "run")
    shown = capsys.readouterr().out
    values = f"{first['eval/auc']:8.1%} {last['eval/auc']:8.1%}"
    assert f"AUC, right against wrong steps  {values}\n" in shown
    assert re.search(
        r"\n> How much is 72 - 23 - 17\?\np\(right\)  is     step\n +\d\.\d\d  right", shown
    )
    assert re.search(r"\n +\d\.\d\d  wrong  The answer is -?\d+\.\n", shown)
