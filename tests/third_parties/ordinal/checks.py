"""What every trainer has to prove, and the probabilities by hand."""

import pytest
import torch
from rlhf_trainer_ordinal import OrdinalConfig
from rlhf_trainer_ordinal.rows import rated
from rlhf_trainer_ordinal.trainer import log_likelihood
from transformers import AutoTokenizer

from rlhf.errors import RLHFError
from rlhf_demo import base_model_folder, rows
from rlhf_devkit import TrainerConformance
from rlhf_rows import read_row


class TestOrdinal(TrainerConformance):
    trainer = "ordinal"
    others = {"levels": 6}


def test_rated_rows_are_found_by_their_name_and_read_with_the_trainers_levels() -> None:
    row = rows("arithmetic", "eval", "rated")[0]
    tokenizer = AutoTokenizer.from_pretrained(base_model_folder())
    (read,) = read_row(rated, row, tokenizer, section=OrdinalConfig())
    tokens = [*read.prompt, *read.answers[0].tokens]
    assert tokenizer.decode(tokens) == row["text"] + row["reply"] + tokenizer.eos_token
    with pytest.raises(RLHFError) as error:
        read_row(rated, {**row, "rating": 4}, tokenizer, section=OrdinalConfig(levels=3))
    assert str(error.value) == "the row: `rating` must be an integer from 1 to 3, got 4"


def test_the_probabilities_of_all_ratings_sum_to_one() -> None:
    found, thresholds = torch.full([3], 0.5), torch.tensor([0.0, 1.0])
    chances = log_likelihood(found, thresholds, torch.tensor([1, 2, 3])).exp()
    low, high = torch.sigmoid(torch.tensor([-0.5, 0.5])).tolist()
    assert chances.tolist() == pytest.approx([low, high - low, 1 - high])
