"""What every trainer has to prove, and the probabilities by hand."""

import pytest
import torch
from rlhf_trainer_ordinal.trainer import log_likelihood

from rlhf_devkit import TrainerConformance


class TestOrdinal(TrainerConformance):
    trainer = "ordinal"
    rows = [
        {"text": f"How much is {n} + {n}?", "reply": str(2 * n + n % 5), "rating": 5 - n % 5}
        for n in range(29)
    ]
    others = {"levels": 6}


def test_the_probabilities_of_all_ratings_sum_to_one() -> None:
    found, thresholds = torch.full([3], 0.5), torch.tensor([0.0, 1.0])
    chances = log_likelihood(found, thresholds, torch.tensor([1, 2, 3])).exp()
    low, high = torch.sigmoid(torch.tensor([-0.5, 0.5])).tolist()
    assert chances.tolist() == pytest.approx([low, high - low, 1 - high])
