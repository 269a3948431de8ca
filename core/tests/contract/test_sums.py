"""A mean is a sum over all ranks and micro-batches over a count that is known beforehand."""

import pytest
import torch

from rlhf.contract.sums import Sums, poison_unless_finite, weighted_loss
from rlhf.engine import Mesh
from rlhf.trainer import Loss, Term


def scalar(value: float) -> torch.Tensor:
    return torch.tensor(value, requires_grad=True)


def test_two_terms_have_two_denominators_in_one_step() -> None:
    loss = Loss((Term(scalar(6.0), "answers"), Term(scalar(8.0), "tokens", weight=0.5)))
    assert weighted_loss(loss, {"answers": 2, "tokens": 16}).item() == 6 / 2 + 0.5 * 8 / 16


def test_a_mean_over_weights_that_add_up_to_less_than_one_is_one_too() -> None:
    loss = Loss((Term(scalar(0.5), "weight"),), {"mean": (torch.tensor(0.25), "weight")})
    totals = {"weight": 0.125}
    assert weighted_loss(loss, totals).item() == 4.0
    sums = Sums(Mesh())
    sums.add_terms(loss)
    assert sums.reduce(totals).read(lambda found: {}) == {"loss": 4.0, "mean": 2.0}


def test_a_count_of_zero_gives_no_loss_and_a_gradient_of_zero_instead_of_nan() -> None:
    total = scalar(0.0)
    weighted = weighted_loss(Loss((Term(total, "labels"),)), {"labels": 0})
    weighted.backward()
    assert weighted.item() == 0.0
    assert total.grad is not None


def test_an_infinite_loss_with_a_finite_gradient_is_made_visible_to_the_gradient_check() -> None:
    weight = torch.ones(2, requires_grad=True)
    loss = weight.sum()
    poison_unless_finite(loss, loss + torch.inf).backward()
    assert weight.grad is not None
    assert weight.grad.isnan().all()


def test_a_finite_loss_keeps_its_gradient_to_the_bit() -> None:
    weight = torch.ones(2, requires_grad=True)
    loss = (weight * 3).sum()
    poison_unless_finite(loss, loss).backward()
    assert weight.grad is not None
    assert weight.grad.tolist() == [3.0, 3.0]


def test_metrics_are_means_over_the_step_and_plain_sums_go_to_derive() -> None:
    sums = Sums(Mesh())
    totals = {"tokens": 10.0}
    for right, hits in ((3.0, 2.0), (4.0, 1.0)):
        loss = Loss(
            (Term(scalar(5.0), "tokens"),),
            {"accuracy": (scalar(right), "tokens"), "hits": (scalar(hits), "")},
        )
        sums.add(loss, weighted_loss(loss, totals))
    metrics = sums.reduce(totals).read(lambda sums: {"double": 2 * sums["hits"]})
    assert metrics == pytest.approx({"loss": 1.0, "accuracy": 0.7, "double": 6.0})


def test_extremes_are_those_of_the_whole_step_and_a_sum_may_have_a_dimension() -> None:
    sums = Sums(Mesh())
    for low, high, counts in ((-2.0, 0.5, [1.0, 0.0]), (-1.0, 3.0, [2.0, 5.0])):
        metrics = {
            "low": (scalar(low), "min"),
            "high": (scalar(high), "max"),
            "counts": (torch.tensor(counts), ""),
        }
        loss = Loss((Term(scalar(1.0), "tokens"),), metrics)
        sums.add(loss, weighted_loss(loss, {"tokens": 2.0}))
    found = sums.reduce({"tokens": 2.0}).read(lambda sums: {"last": sums["counts"][-1]})
    assert found == {"loss": 1.0, "low": -2.0, "high": 3.0, "last": 5.0}


def test_an_evaluation_divides_once_at_its_end() -> None:
    sums = Sums(Mesh())
    for value in (1.0, 2.0):
        sums.add_terms(Loss((Term(scalar(value), "tokens"), Term(scalar(4.0), "answers", 0.5))))
    metrics = sums.reduce({"tokens": 6.0, "answers": 2.0}).read(lambda sums: {})
    assert metrics == pytest.approx({"loss": 3 / 6 + 0.5 * 8 / 2})
