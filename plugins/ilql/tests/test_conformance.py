"""Implicit language Q-learning against what every trainer has to prove, on rows of one to three
answers."""

from collections.abc import Mapping
from typing import Any, ClassVar

import pytest

import rlhf_demo
from rlhf_devkit import NUM_HELD_OUT, NUM_ROWS, TrainerConformance


def rewarded() -> list[dict[str, Any]]:
    """Demo rows with fewer answers in some, and with rewards of any size."""
    made = rlhf_demo.rows("arithmetic", "train", "rewarded")[: NUM_ROWS + NUM_HELD_OUT]
    for number, row in enumerate(made):
        kept = 1 + number % 3
        row["completions"] = row["completions"][:kept]
        row["rewards"] = [3.0 * reward - 0.1 * number for reward in row["rewards"][:kept]]
    return made


class TestILQL(TrainerConformance):
    trainer = "ilql"
    rows = rewarded()
    words = ("--ilql.alpha", "0.3", "--ilql.steps_for_target_q_sync", "1")
    others: ClassVar[Mapping[str, Any]] = {
        "tau": 0.9,
        "gamma": 0.5,
        "cql_scale": 1.0,
        "awac_scale": 0.5,
        "beta": 1.0,
        "alpha": 0.9,
        "steps_for_target_q_sync": 2,
        "two_qs": False,
    }

    marks_of_other_layouts = (pytest.mark.matrix,)

    @pytest.mark.matrix
    def test_a_run_with_another_setting_resumes_to_the_last_bit(self, bench: Any) -> None:
        super().test_a_run_with_another_setting_resumes_to_the_last_bit(bench)
