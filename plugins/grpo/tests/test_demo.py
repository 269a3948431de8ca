"""`rlhf run grpo` without a model and data: the embedded model learns sums in brackets."""

from pathlib import Path

import pytest

from rlhf_devkit import shared, tiny
from rlhf_rollouts.sums import right_lines, solved

STEPS = ["1 + 2 = 3", "3 + 4 = 7"]


def test_the_reward_of_the_demo_is_the_share_of_right_lines() -> None:
    answers = ["1 + 2 = 3\n3 + 4 = 7\n", "1 + 2 = 3\n3 + 4 = 8\n", "1 + 2 = 3\n", "a\n" * 3]
    assert right_lines(answers, steps=[STEPS] * 4) == [1.0, 0.5, 0.0, 0.0]
    assert solved(answers, steps=[STEPS] * 4) == [1.0, 0.0, 0.0, 0.0]


@pytest.mark.matrix
def test_the_demo_moves_the_held_out_accuracy(tmp_path: Path) -> None:
    words = ["--output", str(tmp_path / "run")]
    metrics = shared(1).run(tiny.run, "grpo", words, str(tmp_path / "cache"), timeout=600)[0]
    first, last = (
        [line["eval/rewards/solved/mean"] for line in metrics if "eval/loss" in line][place]
        for place in (0, -1)
    )
    assert first < 0.5
    assert last >= 0.95
