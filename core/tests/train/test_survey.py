"""Values of the whole step: their order does not depend on the split."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch

from rlhf.contract.calls import Contract
from rlhf.contract.sums import total_of
from rlhf.data.example import Answer, Example
from rlhf.data.order import StepPlan
from rlhf.data.packing import filler, pack
from rlhf.engine import Mesh, axes
from rlhf.train.survey import Survey
from rlhf.trainer import Trainer
from rlhf_devkit.ranks import Ranks, ranks_fixture

two = ranks_fixture(2)

ANSWERS = (1, 3, 2, 1)
EXAMPLES = [
    Example([5], [Answer([10 * row + number]) for number in range(count)])
    for row, count in enumerate(ANSWERS)
]
ORDER = (2, 0, 3, 1)
"""The step's examples, out of the order of the data."""


class Asking(Trainer):
    """The row's number per example; the first token of each answer."""

    def example(self, row: Any) -> Example: ...
    def setup(self, run: Any) -> None: ...
    def loss(self, batch: Any) -> Any: ...

    def survey(self, batch: Any) -> dict[str, torch.Tensor]:
        first = batch.tokens[batch.answer_end].float()
        return {"row": torch.tensor(batch.rows, dtype=torch.float32), "token": first}


def plan(answers: Sequence[int] = ANSWERS) -> StepPlan:
    rows = np.array(ORDER)
    return StepPlan(
        step=0, epoch=0, epoch_done=1.0, rows=rows, lengths=rows, paths=rows,
        answers=np.array(answers)[rows], totals={"examples": 4.0}, layout=[], micro=[],
    )  # fmt: skip


def surveyed(mesh: Mesh, shares: Sequence[Sequence[Sequence[int]]]) -> list[Any]:
    """The values in `batch.step` of each of this rank's micro-batches."""
    own = shares[mesh.data.rank]
    batches = [pack(EXAMPLES, rows) if len(rows) else filler() for rows in own]
    survey = Survey(Contract(Asking(None, None), {}), mesh)
    taken, _ = survey.batches(plan(), batches, torch.device("cpu"))
    return [{name: value.tolist() for name, value in batch.step.items()} for batch in taken]


WHOLE = {"row": [2.0, 0.0, 3.0, 1.0], "token": [20.0, 21.0, 0.0, 30.0, 10.0, 11.0, 12.0]}


def test_values_are_in_the_order_of_the_step() -> None:
    first, second = surveyed(Mesh(), [[[0, 1], [2, 3]]])
    assert {name: first[name] for name in WHOLE} == WHOLE
    assert (first["examples"], first["answers"]) == ([1, 3], [2, 4, 5, 6])
    assert (second["examples"], second["answers"]) == ([0, 2], [0, 1, 3])


def on_rank(shares: Any, axis: str = "data") -> list[Any]:
    rank = torch.distributed.get_rank()
    return surveyed(Mesh(rank=rank, world=2, **axes(rank, **{axis: 2})), shares)


@pytest.mark.parametrize(
    "shares",
    [
        [[[0, 1]], [[2, 3]]],
        # The first rank cannot know what a value is per: it has one answer for each example.
        [[[0, 3]], [[1, 2]]],
        [[[0, 3, 1, 2]], [[]]],
        [[[1], []], [[3], [0, 2]]],
    ],
)
def test_they_are_the_same_on_any_split_over_ranks(shares: Any, two: Ranks) -> None:
    for steps in two.run(on_rank, shares):
        for step in steps:
            assert {name: step[name] for name in WHOLE} == WHOLE


def test_ranks_of_a_tensor_axis_count_once(two: Ranks) -> None:
    for steps in two.run(on_rank, [[[0, 1, 2, 3]]], "tensor"):
        assert {name: steps[0][name] for name in WHOLE} == WHOLE


def test_a_value_s_sum_counts_like_a_count_of_the_plan() -> None:
    totals = {"answers": 7.0, "kl": torch.tensor([1.0, 2.5])}
    assert (total_of("answers", totals), total_of("kl", totals)) == (7.0, 3.5)
