"""Kahneman-Tversky optimisation against numbers worked by hand."""

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import attrs
import numpy as np
import pytest
import torch
from torch import Tensor

import rlhf_demo
from rlhf.errors import RLHFError
from rlhf.trainer import Answer, Example
from rlhf_devkit import pack, tiny, weighted_loss
from rlhf_plugin_kto.config import KTOConfig, check
from rlhf_plugin_kto.losses import balance_advice, divergence, kto
from rlhf_plugin_kto.trainer import KTOTrainer

UNWEIGHTED: Any = {"beta": 0.1, "desirable_weight": 1.0, "undesirable_weight": 1.0}


def sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x))


def test_the_loss_is_one_minus_the_value_of_the_paper() -> None:
    logratios = torch.tensor([2.0, 2.0, -3.0], dtype=torch.float64, requires_grad=True)
    desirable = torch.tensor([1.0, 0.0, 0.0], dtype=torch.float64)
    losses = kto(logratios, desirable, 1.0, beta=0.5, desirable_weight=1.5, undesirable_weight=0.7)
    # 1.5 (1 - s(0.5 (2 - 1))); 0.7 (1 - s(0.5 (1 - 2))); 0.7 (1 - s(0.5 (1 + 3)))
    by_hand = [1.5 * (1 - 0.6224593312), 0.7 * (1 - 0.3775406688), 0.7 * (1 - 0.8807970780)]
    assert losses.tolist() == pytest.approx(by_hand, abs=1e-9)
    losses.sum().backward()
    # The slope of w s(-x) is -w s(x) s(-x), times beta and the side's sign.
    slope = 0.6224593312 * 0.3775406688
    expected = [-1.5 * 0.5 * slope, 0.7 * 0.5 * slope, 0.7 * 0.5 * 0.8807970780 * 0.1192029220]
    assert logratios.grad is not None
    assert logratios.grad.tolist() == pytest.approx(expected, abs=1e-9)


def test_a_policy_that_is_its_reference_loses_half_of_every_weight() -> None:
    losses = kto(torch.zeros(2), torch.tensor([1.0, 0.0]), 0.0, **UNWEIGHTED)
    assert losses.tolist() == [0.5, 0.5]


def test_the_loss_saturates_at_both_ends() -> None:
    far = torch.tensor([1e4, -1e4, 1e4, -1e4])
    losses = kto(far, torch.tensor([1.0, 1.0, 0.0, 0.0]), 0.0, **UNWEIGHTED)
    assert losses.tolist() == pytest.approx([0.0, 1.0, 1.0, 0.0], abs=1e-6)


def test_apo_zero_is_the_loss_at_a_reference_point_of_zero() -> None:
    logratios = torch.tensor([1.0, 1.0])
    losses = kto(logratios, torch.tensor([1.0, 0.0]), 0.0, **UNWEIGHTED)
    assert losses.tolist() == pytest.approx([1 - sigmoid(0.1), sigmoid(0.1)])


def test_the_divergence_is_a_mean_that_is_not_below_zero_and_has_no_gradient() -> None:
    logratios = torch.tensor([3.0, -1.0, 1.0], requires_grad=True)
    found = divergence(logratios)
    assert (found.item(), found.requires_grad) == (1.0, False)
    assert divergence(-logratios).item() == 0.0


class FixedLogprobs:
    """An engine that gives each answer the log-probability of its first token's id, times
    `factor`."""

    def __init__(self, factor: float) -> None:
        self.factor = torch.tensor(factor, requires_grad=True)

    def __call__(self, batch: Any, readout: Any) -> dict[str, Tensor]:
        return {"logprobs": self.factor * batch.tokens[batch.answer_end].float()}

    def answer_logprobs(self, batch: Any) -> Tensor:
        return self(batch, None)["logprobs"].detach()


def trainer(**settings: Any) -> KTOTrainer:
    """With the log-ratio 0.5 x token id of an answer of one token."""
    made = KTOTrainer(KTOConfig(**settings), tokenizer=None)
    made.policy, made.reference = FixedLogprobs(1.5), FixedLogprobs(1.0)  # type: ignore[assignment]
    return made


def example(token: int, *, label: bool) -> Example:
    row = SimpleNamespace(prompt=[9], answers=[Answer([token])], columns={"label": label})
    return trainer().example(row)


ROWS = [example(4, label=True), example(2, label=False), example(6, label=True)]


def test_the_reference_point_is_that_of_the_whole_step_whatever_the_micro_batch() -> None:
    own, kl = trainer(), torch.tensor([3.0, -1.0, 1.0])
    whole = attrs.evolve(pack(ROWS, [0, 1, 2]), step={"kl": kl})
    parts = [attrs.evolve(pack(ROWS, [row]), step={"kl": kl}) for row in range(3)]
    totals = {"examples": 3}
    expected = (sigmoid(-0.1 * (2 - 1)) + sigmoid(0.1 * (1 - 1)) + sigmoid(-0.1 * (3 - 1))) / 3
    assert weighted_loss(own.loss(whole), totals).item() == pytest.approx(expected)
    split = sum(weighted_loss(own.loss(part), totals).item() for part in parts)
    assert split == pytest.approx(expected)


def test_the_metrics_are_means_over_each_sides_own_rows() -> None:
    batch = attrs.evolve(pack(ROWS, [0, 1, 2]), step={"kl": torch.tensor([3.0, -1.0, 1.0])})
    metrics = trainer().loss(batch).metrics
    found = trainer().derive({name: value.item() for name, (value, _) in metrics.items()})
    assert found == pytest.approx(
        {
            "count/chosen": 2, "rewards/chosen": 0.1 * (2 + 3) / 2, "logps/chosen": 1.5 * 5,
            "count/rejected": 1, "rewards/rejected": 0.1, "logps/rejected": 3.0,
            "rewards/margins": 0.25 - 0.1,
        }
    )  # fmt: skip
    kl, per = metrics["kl"]
    assert (kl.item() / 3, per) == (1.0, "examples")
    # 2 > 1 and 3 > 1 are right for desirable rows; 1 < 1 is not for the other.
    assert metrics["rewards/accuracies"][0].item() == 2


def test_a_side_without_rows_has_no_mean() -> None:
    batch = attrs.evolve(pack(ROWS[:1], [0]), step={"kl": torch.zeros(1)})
    metrics = trainer().loss(batch).metrics
    found = trainer().derive({name: value.item() for name, (value, _) in metrics.items()})
    assert set(found) == {"count/chosen", "rewards/chosen", "logps/chosen", "count/rejected"}


def test_the_survey_is_of_the_policy_against_the_reference() -> None:
    values = trainer().survey(pack(ROWS, [0, 2]))
    assert values["kl"].tolist() == [2.0, 3.0]
    assert trainer().needs_survey()
    assert not trainer(loss="apo_zero_unpaired").needs_survey()


def test_apo_zero_needs_no_survey_and_has_no_divergence() -> None:
    loss = trainer(loss="apo_zero_unpaired").loss(pack(ROWS, [0]))
    assert loss.terms[0].sum.item() == pytest.approx(sigmoid(-0.1 * 2))
    assert "kl" not in loss.metrics


@pytest.mark.parametrize(
    ("counts", "advice"),
    [
        ((100, 100, 1.0, 1.0), None),
        ((400, 300, 1.0, 1.0), None),
        (
            (300, 700, 1.0, 1.0),
            "300 desirable and 700 undesirable rows with the weights 1 and 1 have the ratio 0.429, "
            "outside 1 to 1.33 (eq. 8 of arXiv 2402.01306); set kto.desirable_weight between 2.33 "
            "and 3.11",
        ),
        (
            (700, 300, 1.0, 1.0),
            "700 desirable and 300 undesirable rows with the weights 1 and 1 have the ratio 2.33, "
            "outside 1 to 1.33 (eq. 8 of arXiv 2402.01306); set kto.undesirable_weight between "
            "1.75 and 2.33",
        ),
        (
            (5, 0, 1.0, 1.0),
            "only one side of 5 desirable and 0 undesirable rows has any weight, so nothing bounds "
            "the rewards",
        ),
    ],
)
def test_weights_outside_the_papers_range_are_a_warning_with_numbers(
    counts: Any, advice: str | None
) -> None:
    assert balance_advice(*counts) == advice


class Labels(list[float]):
    """Training rows of which only the labels are known."""

    def value(self, name: str) -> Any:
        assert name == "desirable"
        return np.array(self, np.float32)


def test_the_warning_counts_the_training_rows() -> None:
    rows: Any = Labels([1.0, 0.0, 0.0])
    (line,) = trainer().remarks(rows)
    assert line.startswith("warning    1 desirable and 2 undesirable rows with the weights 1 and 1")
    assert trainer(desirable_weight=2.5).remarks(rows) == []


def test_rows_too_few_for_the_estimate_of_kl_are_refused_before_anything_loads(
    tmp_path: Path,
) -> None:
    words = tiny.short_run(tmp_path, "unpaired")
    (row, *_) = rlhf_demo.rows("arithmetic", "eval", "unpaired")
    held_out = tiny.write_rows(tmp_path / "one.jsonl", [row])
    words += ["--data.eval", str(held_out), "--output", str(tmp_path / "run")]
    with pytest.raises(RLHFError) as error:
        tiny.run("kto", words, str(tmp_path / "cache"), True)
    assert not (tmp_path / "run").exists()
    assert str(error.value).startswith("data.eval: 1 of 1 examples come from one row, so ")


def test_weights_that_train_nothing_are_refused() -> None:
    nothing: Any = SimpleNamespace(own=KTOConfig(desirable_weight=0.0, undesirable_weight=0.0))
    with pytest.raises(RLHFError) as error:
        check(nothing)
    assert str(error.value) == (
        "kto.desirable_weight and kto.undesirable_weight are both 0, so nothing is trained; raise "
        "one of them"
    )
