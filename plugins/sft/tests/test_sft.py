"""Supervised fine-tuning against numbers worked by hand."""

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from rlhf.readouts import Head
from rlhf.trainer import Answer, Example
from rlhf_devkit import pack, weighted_loss
from rlhf_plugin_sft.config import SFTConfig
from rlhf_plugin_sft.trainer import SFTTrainer


class Uniform:
    """An engine whose hidden states are zero: every token has the probability 1 / vocabulary."""

    def __call__(self, batch: Any, readout: Any) -> Any:
        hidden = torch.zeros(len(batch.tokens), 4, requires_grad=True)
        head = Head(weight=torch.ones(10, 4), bias=None, scale=1.0, softcap=None)
        return readout(hidden, head, batch)


def trainer(**settings: Any) -> SFTTrainer:
    made = SFTTrainer(SFTConfig(**settings), tokenizer=None)
    made.policy = Uniform()
    return made


def row() -> Any:
    return SimpleNamespace(prompt=[1, 2, 3], answers=[Answer([4, 5, 6], [True, False, True])])


def test_the_loss_of_a_uniform_model_is_the_log_of_the_vocabulary() -> None:
    loss = trainer().loss(pack([trainer().example(row())], [0]))
    assert weighted_loss(loss, {"tokens": 2}).item() == pytest.approx(math.log(10))
    entropy, per = loss.metrics["entropy"]
    assert (entropy.item() / 2, per) == (pytest.approx(math.log(10)), "tokens")


def test_only_the_answer_is_trained_on_unless_train_on_is_everything() -> None:
    assert trainer().example(row()) == Example([1, 2, 3], row().answers)
    everything = trainer(train_on="everything").example(row())
    batch = pack([everything], [0])
    assert batch.predict.tolist() == [2, 3, 4, 5, 6]


def test_the_first_answer_token_is_predicted_from_the_last_prompt_token() -> None:
    batch = pack([trainer().example(row())], [0])
    assert batch.predict.tolist() == [4, 6]
    assert batch.predict_from.tolist() == [2, 4]
