"""Reward models: losses and metrics against numbers worked by hand."""

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from rlhf.errors import RLHFError
from rlhf.readouts import Head
from rlhf.trainer import Answer, PackedBatch
from rlhf_devkit import pack, read_config, step_metrics, weighted_loss
from rlhf_plugin_rm import losses
from rlhf_plugin_rm.config import RMConfig
from rlhf_plugin_rm.trainer import RMTrainer


def tensor(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64, requires_grad=True)


def test_equal_rewards_cost_the_log_of_two() -> None:
    assert losses.bradley_terry(tensor(0.0), tensor(0.0)).item() == pytest.approx(math.log(2))


def test_a_pair_costs_the_log_of_its_odds_and_pulls_with_the_chance_of_being_wrong() -> None:
    difference = tensor(math.log(3) + 0.5)
    value = losses.bradley_terry(difference, tensor(0.5))
    value.backward()
    # sigmoid(ln 3) is 3/4: the loss is ln 4/3, its gradient -(1 - 3/4).
    assert value.item() == pytest.approx(math.log(4 / 3))
    assert difference.grad is not None
    assert difference.grad.item() == pytest.approx(-0.25)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rewards_that_are_far_apart_do_not_overflow(dtype: torch.dtype) -> None:
    far = torch.tensor([-1e4, 1e4], dtype=dtype, requires_grad=True)
    value = losses.bradley_terry(far, torch.zeros(2, dtype=dtype))
    value.sum().backward()
    assert value.tolist() == pytest.approx([1e4, 0.0], rel=1e-2)
    assert far.grad is not None
    assert far.grad.tolist() == [-1.0, 0.0]


def test_every_pair_of_an_answer_list_has_the_same_weight_and_a_tie_has_none() -> None:
    nan = float("nan")
    weights = losses.pair_weights(
        torch.tensor([[2.0, 1.0, 3.0], [1.0, 2.0, nan], [1.0, 1.0, 2.0], [1.0, 1.0, nan]])
    )
    third, half = pytest.approx(1 / 3), 0.5
    assert weights[0].tolist() == [[0, 0, third], [third, 0, third], [0, 0, 0]]
    assert weights[1].tolist() == [[0, 1, 0], [0, 0, 0], [0, 0, 0]]
    assert weights[2].tolist() == [[0, 0, half], [0, 0, half], [0, 0, 0]]
    assert not weights[3].any()


def test_centring_is_the_square_of_the_sum_of_a_pair() -> None:
    rewards = tensor(1.0, 2.0)[None].detach().requires_grad_()
    value = losses.centring(rewards, losses.pair_weights(torch.tensor([[1.0, 2.0]])))
    value.sum().backward()
    assert value.item() == 9.0
    assert rewards.grad is not None
    assert rewards.grad.tolist() == [[6.0, 6.0]]


def test_plackett_luce_is_a_product_of_choices() -> None:
    # Weights 6, 3, 1 in the order 6 > 3 > 1: 6/10 of the first choice, 3/4 of the second.
    rewards = torch.tensor([[math.log(3), math.log(6), 0.0]], requires_grad=True)
    ranks = torch.tensor([[2.0, 1.0, 3.0]])
    value = losses.plackett_luce(rewards, ranks, torch.zeros(1))
    value.sum().backward()
    assert value.item() == pytest.approx(-math.log(6 / 10) - math.log(3 / 4), rel=1e-6)
    # Of each answer the chances to be chosen that it had, less the choice that it was.
    expected = [3 / 10 + 3 / 4 - 1, 6 / 10 - 1, 1 / 10 + 1 / 4]
    assert rewards.grad is not None
    assert rewards.grad[0].tolist() == pytest.approx(expected)


def test_plackett_luce_of_two_answers_is_bradley_terry_with_its_margin() -> None:
    rewards = torch.tensor([[0.3, 1.1, 5.0], [2.0, -1.0, 5.0]])
    ranks = torch.tensor([[2.0, 1.0, torch.nan], [1.0, 2.0, torch.nan]])
    margin = torch.tensor([0.7, 0.0])
    pair = losses.bradley_terry(torch.tensor([0.8, 3.0]), margin)
    torch.testing.assert_close(losses.plackett_luce(rewards, ranks, margin), pair)


class Given:
    """An engine whose rewards are the last tokens' ids over ten."""

    def __call__(self, batch: Any, readout: Any) -> Any:
        hidden = (batch.tokens.float() / 10)[:, None].requires_grad_()
        return readout(hidden, Head(weight=torch.ones(1, 1)), batch)


def trainer(**settings: Any) -> RMTrainer:
    made = RMTrainer(RMConfig(**settings), tokenizer=None)
    made.policy = Given()  # type: ignore[assignment]
    return made


def row(ends: list[int], ranks: list[float], **columns: Any) -> Any:
    answers = [Answer([3, end]) for end in ends]
    return SimpleNamespace(prompt=[1, 2], answers=answers, columns={"ranks": ranks, **columns})


def batch_of(made: RMTrainer, *rows: Any) -> Any:
    return pack([made.example(each) for each in rows], range(len(rows)))


ROWS = (row([30, 10], [1, 2], margin=1.0), row([20, 40, 5], [2, 1, 3], margin=None))


def test_a_step_is_the_mean_over_examples_of_the_mean_over_their_pairs() -> None:
    made = trainer()
    loss = made.loss(batch_of(made, *ROWS))
    pairs = [4.0 - 2.0, 2.0 - 0.5, 4.0 - 0.5]
    second = sum(math.log1p(math.exp(-d)) for d in pairs) / 3
    expected = (math.log1p(math.exp(-1.0)) + second) / 2
    assert weighted_loss(loss, {"examples": 2}).item() == pytest.approx(expected)


def test_a_prompt_is_there_once_for_all_its_answers() -> None:
    batch = batch_of(trainer(), *ROWS)
    real = batch.tokens[: len(batch.tokens) - int((batch.example < 0).sum())]
    assert real.tolist() == [1, 2, 3, 30, 3, 10, 1, 2, 3, 20, 3, 40, 3, 5]


def test_metrics_have_trls_names_and_the_deviation() -> None:
    made = trainer()
    batches = [batch_of(made, *ROWS), batch_of(made, row([10, 20], [1, 2])), filler(made)]
    found = step_metrics(made, batches, {"examples": 3.0, "answers": 7.0})
    rewards = torch.tensor([3.0, 1.0, 2.0, 4.0, 0.5, 1.0, 2.0])
    margins = (2.0 + (2.0 + 1.5 + 3.5) / 3 - 1.0) / 3
    assert found.pop("loss") > 0
    assert found == pytest.approx(
        {
            "accuracy": 2 / 3,
            "margin": margins,
            "mean_reward": rewards.mean().item(),
            "min_reward": 0.5,
            "max_reward": 4.0,
            "std_reward": rewards.std(correction=0).item(),
        }
    )


def filler(made: RMTrainer) -> PackedBatch:
    """A batch without examples."""
    return pack([made.example(ROWS[0])], [])


def test_a_filler_has_no_loss_and_a_graph() -> None:
    made = trainer(centring=0.1)
    loss = made.loss(filler(made))
    weighted = weighted_loss(loss, {"examples": 0})
    weighted.backward()
    assert weighted.item() == 0.0


def test_normalising_without_held_out_rows_is_an_error() -> None:
    words = ["--model", "any", "--data", "any.jsonl", "--rm.normalise", "true"]
    with pytest.raises(RLHFError) as caught:
        read_config("rm", overrides=words)
    assert str(caught.value) == (
        "rm.normalise needs held-out rows to measure rewards on; set data.eval"
    )
