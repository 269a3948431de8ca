"""What every trainer has to prove, and the loss against numbers worked by hand."""

import math

import pytest
import torch

from rlhf_devkit import TrainerConformance
from rlhf_trainer_new_name.trainer import focal


class TestNewName(TrainerConformance):
    trainer = "new_name"
    others = {"gamma": 0.5}


def test_a_likely_token_counts_less() -> None:
    logprobs = torch.tensor([math.log(0.5), math.log(0.9)])
    expected = [0.25 * math.log(2), 0.01 * -math.log(0.9)]
    assert focal(logprobs, gamma=2.0).tolist() == pytest.approx(expected, rel=1e-4)


def test_the_gradient_of_a_certain_token_is_finite() -> None:
    logprobs = torch.zeros(1, requires_grad=True)
    focal(logprobs, gamma=0.5).sum().backward()
    assert logprobs.grad is not None
    assert torch.isfinite(logprobs.grad).all()
