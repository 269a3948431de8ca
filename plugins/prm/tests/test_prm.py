"""Process reward models: losses and measures against numbers worked by hand."""

import math
from types import SimpleNamespace
from typing import Any

import attrs
import pytest
import torch

from rlhf.errors import RLHFError
from rlhf.formats import Row
from rlhf.readouts import Head
from rlhf.trainer import Answer
from rlhf_demo import base_model_folder
from rlhf_devkit import pack, read_config, step_metrics, weighted_loss
from rlhf_plugin_prm import measures
from rlhf_plugin_prm.config import PRMConfig
from rlhf_plugin_prm.losses import log_odds, step_loss
from rlhf_plugin_prm.trainer import PRMTrainer, token_id

NAN = math.nan


def test_a_step_costs_the_cross_entropy_of_its_soft_label() -> None:
    odds = torch.tensor([0.0, math.log(3), math.log(3)], requires_grad=True)
    labels = torch.tensor([0.3, 1.0, 0.25])
    value = step_loss(odds, labels)
    value.sum().backward()
    # p is 1/2, 3/4 and 3/4; the gradient is p - y.
    mixed = -(0.25 * math.log(3 / 4) + 0.75 * math.log(1 / 4))
    assert value.tolist() == pytest.approx([math.log(2), math.log(4 / 3), mixed])
    assert odds.grad is not None
    assert odds.grad.tolist() == pytest.approx([0.2, -0.25, 0.5])


def test_the_loss_does_not_overflow() -> None:
    odds = torch.tensor([-1e4, 1e4])
    assert step_loss(odds, torch.tensor([1.0, 1.0])).tolist() == [1e4, 0.0]


def test_log_odds_are_those_of_the_softmax_over_wrong_and_right() -> None:
    scores = torch.tensor([[1.0, 3.0]])
    assert log_odds(scores).sigmoid().item() == pytest.approx(scores.softmax(-1)[0, 1].item())


def test_the_area_counts_pairs_in_the_right_order_and_ties_by_half() -> None:
    # Right steps at 2 and 0, wrong ones at 1 and 0: of four pairs two are won, one ties.
    odds = torch.tensor([2.0, 0.0, 1.0, 0.0])
    right = torch.tensor([True, True, False, False])
    found = measures.area(
        measures.histogram(odds, ~right).tolist(), measures.histogram(odds, right).tolist()
    )
    assert found == (2 + 0.5) / 4


@pytest.mark.parametrize(("mean", "spread"), [(0.0, 0.02), (0.0, 1.0), (3.0, 2.0), (-9.0, 4.0)])
def test_the_area_of_the_histogram_is_near_the_area_itself(mean: float, spread: float) -> None:
    torch.manual_seed(0)
    right = mean + spread * (torch.randn(400) + 0.8)
    wrong = mean + spread * torch.randn(300)
    exact = (right[:, None] > wrong).float().mean().item()
    every = torch.ones(400, dtype=torch.bool)
    found = measures.area(
        measures.histogram(wrong, every[:300]).tolist(),
        measures.histogram(right, every).tolist(),
    )
    assert found == pytest.approx(exact, abs=2e-3)


class Given:
    """An engine whose hidden states are the tokens' ids less ten; odds are twice that."""

    def __call__(self, batch: Any, readout: Any) -> Any:
        hidden = (batch.tokens.float() - 10)[:, None].requires_grad_()
        return readout(hidden, Head(weight=torch.tensor([[-1.0], [1.0]])), batch)


def trainer(**settings: Any) -> PRMTrainer:
    made = PRMTrainer(PRMConfig(**settings), tokenizer=None)
    made.policy = Given()  # type: ignore[assignment]
    return made


def row(ends: list[int], labels: list[float]) -> Row:
    """Steps of two tokens, the second of which is the given one."""
    tokens = [token for end in ends for token in (3, end)]
    places = [2 * number + 1 for number in range(len(ends))]
    columns = {"ends": places, "labels": labels}
    return Row([1], [Answer(tokens, [False] * len(tokens))], columns)


FIRST = row([11, 9, 12], [1.0, 0.0, 0.4])
SECOND = row([9, 11, 12], [NAN, 1.0, 1.0])
THIRD = row([12, 13], [1.0, 0.0])


def batches(made: PRMTrainer) -> list[Any]:
    examples = [made.example(each) for each in (FIRST, SECOND, THIRD)]
    return [pack(examples, rows) for rows in ([0, 2], [1], [])]


def test_a_row_with_images_is_refused() -> None:
    pictured: Any = SimpleNamespace(files={}, lines=["image 1: 8 x 8 pixels, 1 token"])
    with pytest.raises(RLHFError) as error:
        trainer().example(attrs.evolve(FIRST, images=pictured))
    assert str(error.value) == (
        "the row has images, which prm does not read; remove them, or the row"
    )


def test_only_labelled_steps_count_and_each_counts_once() -> None:
    made = trainer()
    values = [weighted_loss(made.loss(batch), {"labels": 7}).item() for batch in batches(made)]
    odds = [2.0, -2.0, 4.0, 2.0, 4.0, 4.0, 6.0]
    labels = [1.0, 0.0, 0.4, 1.0, 1.0, 1.0, 0.0]
    costs = [math.log1p(math.exp(o)) - y * o for o, y in zip(odds, labels, strict=True)]
    assert sum(values) == pytest.approx(sum(costs) / 7, rel=1e-5)
    assert values[2] == 0.0


def test_measures_are_over_the_whole_evaluation() -> None:
    made = trainer()
    found = step_metrics(made, batches(made), {"labels": 7.0, "examples": 3.0})
    # Wrong are steps 2 and 3 of the first row and 2 of the third; said wrong is 2 of the first.
    assert found["accuracy"] == pytest.approx(5 / 7)
    assert found["first_error_accuracy"] == pytest.approx(2 / 3)
    assert found["f1_wrong"] == pytest.approx(2 * 1 / (3 + 1))
    # Right at 2, 2, 4, 4 against wrong at -2, 4, 6: four pairs are won, two tie.
    assert found["auc"] == pytest.approx((4 + 2 / 2) / 12)


def test_without_a_wrong_step_there_is_no_area() -> None:
    made = trainer()
    found = step_metrics(made, batches(made)[1:2], {"labels": 2.0, "examples": 1.0})
    assert "auc" not in found
    assert found["first_error_accuracy"] == 1.0


def test_only_the_last_labelled_step_is_an_outcome_reward() -> None:
    made = trainer(steps="last")
    (labels,) = made.example(row([11, 9, 12], [1.0, 0.0, NAN])).values["label"]
    assert [place for place, label in enumerate(labels) if not math.isnan(label)] == [3]


def test_settings_without_effect_are_refused() -> None:
    with pytest.raises(RLHFError) as caught:
        read_config("prm", overrides=["--prm.reward_tokens", "[good, bad]"], inputs=False)
    assert str(caught.value) == "prm: reward_tokens need formulation token"


def demo_tokenizer() -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(base_model_folder())


def test_reward_tokens_must_be_two_tokens() -> None:
    tokenizer = demo_tokenizer()
    assert token_id(tokenizer, "+") != token_id(tokenizer, "-")
    ids = tokenizer("no way", add_special_tokens=False)["input_ids"]
    with pytest.raises(RLHFError) as caught:
        token_id(tokenizer, "no way")
    assert str(caught.value) == (
        f"prm.reward_tokens: 'no way' is {len(ids)} tokens in this tokenizer ({ids}); choose a "
        "text that is one token"
    )
    with pytest.raises(RLHFError, match=r"prm.reward_tokens '\+' and '\+' are the same token"):
        PRMTrainer(PRMConfig(formulation="token", reward_tokens=("+", "+")), tokenizer)
