"""Reward models against what every trainer has to prove, on lists of three answers with margins."""

from collections.abc import Mapping
from typing import Any, ClassVar

import pytest

import rlhf_demo
from rlhf_devkit import NUM_HELD_OUT, NUM_ROWS, TrainerConformance


def ranked() -> list[dict[str, Any]]:
    """Demo pairs with a third answer, whose rank lies between, before or beside the others'."""
    made = []
    for number, row in enumerate(rlhf_demo.rows("arithmetic", "train", "preference")):
        answers = [*(row[name][-1]["content"] for name in ("chosen", "rejected")), "No idea."]
        ranks = [[1, 3, 2], [2, 3, 1], [1, 2, 2]][number % 3]
        made.append(
            {
                "prompt": row["prompt"][-1]["content"],
                "answers": answers,
                "ranks": ranks,
                "margin": 0.25 * (number % 4),
            }
        )
    return made[: NUM_ROWS + NUM_HELD_OUT]


class TestRM(TrainerConformance):
    trainer = "rm"
    rows = ranked()
    rate = "2e-3"
    others: ClassVar[Mapping[str, Any]] = {
        "ranking": "plackett_luce",
        "margin": 0.5,
        "centring": 0.01,
    }
    without_effect: ClassVar[Mapping[str, str]] = {
        "normalise": "it concerns users of the exported model",
    }

    marks_of_other_layouts = (pytest.mark.matrix,)
