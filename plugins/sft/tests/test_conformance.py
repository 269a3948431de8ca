"""Supervised fine-tuning against what every trainer has to prove."""

from rlhf_devkit import TrainerConformance


class TestSFT(TrainerConformance):
    trainer = "sft"
    others = {"train_on": "everything"}  # noqa: RUF012
