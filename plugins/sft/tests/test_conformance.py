"""Supervised fine-tuning against what every trainer has to prove."""

import pytest

from rlhf_devkit import TrainerConformance


class TestSFT(TrainerConformance):
    trainer = "sft"
    others = {"train_on": "everything"}  # noqa: RUF012

    marks_of_other_layouts = (pytest.mark.matrix,)
