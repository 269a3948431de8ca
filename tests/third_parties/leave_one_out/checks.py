"""What every trainer has to prove, and the advantages by hand."""

import pytest
import torch
from rlhf_trainer_leave_one_out.trainer import advantages

from rlhf_devkit import TrainerConformance


class TestLeaveOneOut(TrainerConformance):
    trainer = "leave_one_out"
    others = {"answers": 3, "max_new_tokens": 6, "temperature": 0.5}


def test_an_advantage_is_over_the_mean_of_the_others() -> None:
    assert advantages(torch.tensor([1.0, 0.0, 0.5])).tolist() == pytest.approx([0.75, -0.75, 0.0])
