"""`rlhf run rm` alone: the embedded model comes to rank answers to held-out problems."""

import re
from pathlib import Path

import pytest

from rlhf_devkit import shared, tiny
from rlhf_plugin_rm.report import report


@pytest.mark.parametrize(
    ("more", "accuracy", "fall"),
    [
        (["--train.stop_at", "60"], 0.7, 0.2),
        pytest.param([], 0.85, 0.3, marks=pytest.mark.matrix),
    ],
    ids=["its beginning", "whole"],
)
def test_the_demo_moves_the_held_out_accuracy(
    more: list[str],
    accuracy: float,
    fall: float,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = ["--output", str(tmp_path / "run"), *more]
    metrics = shared(1).run(tiny.run, "rm", words, str(tmp_path / "cache"), timeout=600)[0]
    evaluations = [line for line in metrics if "eval/loss" in line]
    first, last = evaluations[0], evaluations[-1]
    assert first["eval/accuracy"] < 0.6
    assert last["eval/accuracy"] > accuracy
    assert last["eval/loss"] < first["eval/loss"] - fall
    report(None, tmp_path / "run")
    shown = capsys.readouterr().out
    values = f"{first['eval/accuracy']:8.1%} {last['eval/accuracy']:8.1%}"
    assert f"pairs in the right order    {values}\n" in shown
    assert "\n> How much is 72 - 23 - 17?\n reward  rank  answer\n" in shown
    rewards = [float(found) for found in re.findall(r"\n +(-?\d+\.\d\d) +\d  ", shown)]
    assert len(rewards) == 8
    assert rewards[:4] == sorted(rewards[:4], reverse=True)
