"""The demo of ilql: the heads find the right sums among more frequent wrong ones."""

from pathlib import Path

import pytest

from rlhf_devkit import shared, tiny
from rlhf_plugin_ilql.report import accuracies, report


@pytest.mark.matrix
def test_the_heads_raise_the_share_of_right_sums(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--output", str(tmp_path / "run")]
    metrics = shared(1).run(tiny.run, "ilql", words, str(tmp_path / "cache"), timeout=600)[0]
    evaluations = [line for line in metrics if "eval/loss" in line]
    assert evaluations[-1]["eval/losses/loss_q"] < 0.5 * evaluations[0]["eval/losses/loss_q"]
    shares = accuracies(tmp_path / "run" / "model")
    assert shares[0.0] < 0.4
    assert shares[4.0] > shares[0.0] + 0.3
    report(None, tmp_path / "run")
    assert f"right sums with beta 4: {shares[4.0]:6.1%}\n" in capsys.readouterr().out
