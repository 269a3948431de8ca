"""Process reward models against what every trainer has to prove, with soft labels."""

from collections.abc import Mapping
from typing import Any, ClassVar

import pytest

import rlhf_demo
from rlhf_devkit import NUM_HELD_OUT, NUM_ROWS, Other, TrainerConformance


def soft() -> list[dict[str, Any]]:
    """Demo rows with labels between the classes, and one that is not known."""
    made = rlhf_demo.rows("arithmetic", "train", "stepwise")[: NUM_ROWS + NUM_HELD_OUT]
    for number, row in enumerate(made):
        row["labels"] = [0.2 + 0.7 * label for label in row["labels"]]
        if number % 5 == 0:
            row["labels"][0] = None
    return made


class TestPRM(TrainerConformance):
    trainer = "prm"
    rows = soft()
    rate = "2e-3"
    others: ClassVar[Mapping[str, Any]] = {
        "formulation": "token",
        "reward_tokens": Other(value=["7", "8"], under={"formulation": "token"}),
        "separator": "\n\n",
        "placeholder": "<step>",
        "steps": "last",
    }

    marks_of_other_layouts = (pytest.mark.matrix,)
