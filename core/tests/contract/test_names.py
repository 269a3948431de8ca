"""A loss names the same terms and metrics on all ranks and in every step."""

from typing import Any

import pytest
import torch

from rlhf.contract.sums import NameCheck, Sums
from rlhf.engine import Mesh
from rlhf.errors import RLHFError
from rlhf.trainer import Loss, Term
from rlhf_devkit import Ranks, ranks_fixture

two = ranks_fixture(2)


def summed(*losses: Loss, mesh: Mesh | None = None) -> Sums:
    sums = Sums(mesh or Mesh())
    for loss in losses:
        sums.add(loss, torch.tensor(1.0))
    return sums


def loss(*names: str, per: str = "tokens", terms: int = 1) -> Loss:
    one = torch.tensor(1.0)
    return Loss((Term(one, per="tokens"),) * terms, dict.fromkeys(names, (one, per)))


def refused(check: NameCheck, sums: Sums) -> str:
    with pytest.raises(RLHFError) as error:
        check.check(sums)
    return str(error.value)


def on_rank(by_rank: list[list[Loss]]) -> Any:
    """What this rank reports of its micro-batches, or its error."""
    rank = torch.distributed.get_rank()
    mesh = Mesh(rank=rank, world=2)
    sums = summed(*by_rank[rank], mesh=mesh)
    try:
        NameCheck("toy", mesh).check(sums)
    except RLHFError as error:
        return type(error).__name__, str(error)
    return sums.reduce({"tokens": 2.0}).read(lambda sums: {})


MUST = "trainer 'toy': loss() must name the same terms and metrics on all ranks, but "
REMEDY = "; return it for every micro-batch, also for one without rows"


@pytest.mark.parametrize(
    ("other", "difference"),
    [
        (loss("kl", "extra"), "metric 'extra' is missing on rank 0 and per 'tokens' on rank 1"),
        (loss(), "metric 'kl' is per 'tokens' on rank 0 and missing on rank 1"),
        (loss("kl", per=""), "metric 'kl' is per 'tokens' on rank 0 and per '' on rank 1"),
        (
            loss("kl", terms=2),
            "loss term 1 is missing on rank 0 and per 'tokens' on rank 1",
        ),
    ],
)
def test_names_that_differ_between_ranks_are_one_error_on_all_of_them(
    other: Loss, difference: str, two: Ranks
) -> None:
    expected = ("SameOnAllRanks", f"{MUST}{difference}{REMEDY}")
    assert two.run(on_rank, [[loss("kl")], [other]]) == [expected, expected]


def test_a_sum_has_the_same_shape_on_all_ranks(two: Ranks) -> None:
    shapes = [Loss((), {"counts": (torch.zeros(size), "")}) for size in (3, 4)]
    (_, text), _ = two.run(on_rank, [[shapes[0]], [shapes[1]]])
    assert "per '' of shape [3] on rank 0 and per '' of shape [4] on rank 1" in text


def test_one_micro_batch_of_a_rank_is_enough_and_the_order_does_not_matter(two: Ranks) -> None:
    by_rank = [[loss("a", "b")], [loss(), loss("b"), loss("a")]]
    metrics = two.run(on_rank, by_rank)
    assert metrics[0] == metrics[1] == {"loss": 4.0, "a": 1.0, "b": 1.0}
    assert list(metrics[0]) == ["loss", "a", "b"]


def test_a_later_step_with_other_names_is_an_error_without_asking_the_other_ranks() -> None:
    check = NameCheck("toy", Mesh())
    check.check(summed(loss("kl")))
    check.check(summed(loss("kl"), loss()))
    assert refused(check, summed(loss())) == (
        "trainer 'toy': loss() must name the same terms and metrics in every step, but metric 'kl' "
        f"is per 'tokens' in the first step and missing now{REMEDY}"
    )


def test_derive_returns_no_name_of_core() -> None:
    report = summed(loss("kl")).reduce({"tokens": 1.0})
    with pytest.raises(RLHFError) as error:
        report.read(lambda sums: {"loss": 0.0})
    assert str(error.value) == "derive() returns 'loss', a name that core uses itself; rename it"
