"""What every trainer has to prove, and the loss by hand."""

import math

import pytest
import torch
from rlhf_trainer_calibrated.trainer import calibrated

from rlhf_devkit import TrainerConformance


class TestCalibrated(TrainerConformance):
    trainer = "calibrated"
    words = ("--optim.lr", "1e-4")  # Its loss grows without bound at a rate of 3e-3.
    others = {"beta": 0.5, "lambda": 0.5}


def test_the_loss_is_least_at_the_targets() -> None:
    losses = calibrated(torch.tensor([5.0, 0.0]), torch.tensor([-5.0, 0.0]), 0.1, 1.0)
    assert losses.tolist() == pytest.approx([math.log1p(math.exp(-10)), 50 + math.log(2)])
